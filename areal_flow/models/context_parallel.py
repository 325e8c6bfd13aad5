"""One packed row over several processes: each has a slice of its tokens, and some of the heads.

DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509): all layers work on a process's own tokens, and
for attention the processes exchange slices of all heads for whole rows of some. What tokens see is
the packed layout's business, as ever.

Letters: P processes, T packed tokens (a multiple of P), t tokens of a slice, H heads, K key-value
heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from areal_flow.models.attention import AttentionRule
from areal_flow.models.packed_layout import PackedLayout


class ContextLayout:
    """An `AttentionLayout` of one process's slice of a packed row."""

    def __init__(self, row: PackedLayout, group: Any) -> None:
        self._row = row
        self.places = row.places
        self._group = group
        self.slice = own_slice(row.position_ids.shape[1], group)
        self.position_ids = row.position_ids[:, self.slice]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        num_processes = self._group.size()
        repeats = max(1, num_processes // key.shape[1])
        keys, values = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        query, key, value = (self._some_heads(each[0]) for each in (query, keys, values))
        return self._own_tokens(self._row.attend(layer, query, key, value, rule)[0])

    def _some_heads(self, slice_HtD: Tensor) -> Tensor:
        """Return `[1, H / P, T, D]` of all tokens, for a slice `[H, t, D]` of all heads."""
        length, width = slice_HtD.shape[1:]
        parts = slice_HtD.reshape(self._group.size(), -1, length, width)
        received = exchange(parts, self._group)
        return received.transpose(0, 1).reshape(1, parts.shape[1], -1, width)

    def _own_tokens(self, some_THD: Tensor) -> Tensor:
        """Return `[1, t, H, D]` of all heads, for all tokens `[T, H / P, D]` of some heads."""
        num_heads, width = some_THD.shape[1:]
        parts = some_THD.reshape(self._group.size(), -1, num_heads, width)
        received = exchange(parts, self._group)
        return received.transpose(0, 1).reshape(1, parts.shape[1], -1, width)


def own_slice(num_tokens: int, group: Any) -> slice:
    length = num_tokens // group.size()
    return slice(group.rank() * length, (group.rank() + 1) * length)


def exchange(parts: Tensor, group: Any) -> Tensor:
    """Give part p of `[P, ...]` to process p; return what the processes have for this one."""
    received: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    """Its gradient is the same exchange, back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return exchange(gradient, ctx.group), None
