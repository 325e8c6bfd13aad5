"""One attention function for every Hugging Face policy, steered by a layout object.

In: the queries, keys and values of one layer. Out: the attended values. A layout decides what a
token may see: `PackedLayout` (training: sequences side by side in one row), `PrefillLayout`
(prompts, keys and values go to the cache) and `DecodeLayout` (one token a slot against the cache).

It refuses to know what the tokens mean, which policy runs, or whether gradients flow.

Letters: N rows or sequences, S slots, T packed tokens, L padded length, H heads, K key-value heads,
D head dimension.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from areal_flow.models.huggingface import AttentionInterface

ATTENTION_NAME = "areal_flow"

LENGTH_BUCKET = 16
"""Attention lengths are rounded up to this many tokens: other widths change CPU kernels' sums."""


class AttentionLayout(Protocol):
    """Decides which keys and values each query of a layer meets."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return values `[N, T, H, D]` for `query [N, H, T, D]`, `key, value [N, K, T, D]`."""
        ...


def round_up_to_bucket(length: int) -> int:
    """Return the smallest multiple of `LENGTH_BUCKET` that holds `length` tokens."""
    return -(-length // LENGTH_BUCKET) * LENGTH_BUCKET


def attend_by_layout(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    layout: AttentionLayout,
    **_: Any,
) -> tuple[Tensor, None]:
    """Hand one layer's attention to the layout that came with the forward call."""
    return layout.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(ATTENTION_NAME, attend_by_layout)


class PackedLayout:
    """Sequences packed into one row `[1, T]`; no token sees another sequence's tokens.

    The row is unfolded to `[N, L]` for the attention alone, so its cost is that of the padded
    batch and not the square of the packed row.
    """

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu") -> None:
        lengths_N = torch.tensor(lengths, device=device)
        self.max_length = max(lengths)
        steps_L = torch.arange(self.max_length, device=device)
        starts_N = lengths_N.cumsum(0) - lengths_N
        real_NL = steps_L[None, :] < lengths_N[:, None]
        self.gather_NL = torch.where(real_NL, starts_N[:, None] + steps_L[None, :], 0)
        self.scatter_T = real_NL.flatten().nonzero().squeeze(1)
        self.position_ids = steps_L.expand(len(lengths), -1)[real_NL][None, :]

    def _unfold(self, packed: Tensor) -> Tensor:
        num_rows = self.gather_NL.shape[0]
        rows = packed[0].transpose(0, 1).index_select(0, self.gather_NL.flatten())
        return rows.view(num_rows, self.max_length, *rows.shape[1:]).transpose(1, 2)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        attended = scaled_dot_product_attention(
            self._unfold(query),
            self._unfold(key),
            self._unfold(value),
            is_causal=True,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended.transpose(1, 2).flatten(0, 1).index_select(0, self.scatter_T)[None]


class SlotCache:
    """Keys and values of `S` slots, allocated once: `[S, K, L, D]` per layer."""

    def __init__(
        self,
        *,
        num_layers: int,
        max_num_seqs: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.max_length = round_up_to_bucket(max_length)
        shape = (max_num_seqs, num_kv_heads, self.max_length, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.slots_S = torch.arange(max_num_seqs, device=device)

    def copy_prefix(self, prefix: Prefix, row: int, slots: list[int]) -> None:
        """Give each of `slots` its own copy of one prefilled row."""
        for layer, (keys, values) in enumerate(zip(prefix.keys, prefix.values, strict=True)):
            length = keys.shape[2]
            self.keys[layer][slots, :, :length] = keys[row]
            self.values[layer][slots, :, :length] = values[row]


class Prefix:
    """Keys and values of prefilled rows, `[N, K, L, D]` per layer."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []


class PrefillLayout:
    """Rows of right-padded prefixes; what they attend to is kept in a `Prefix`."""

    def __init__(self) -> None:
        self.prefix = Prefix()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.prefix.keys.append(key)
        self.prefix.values.append(value)
        attended = scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended.transpose(1, 2)


class DecodeLayout:
    """One new token in every slot, written at its position, against that slot's cache.

    All `S` rows always take part, idle ones with garbage that nobody reads, and the cache is cut
    at a multiple of `LENGTH_BUCKET`: so a completion's numbers do not depend on its neighbours.
    """

    def __init__(self, cache: SlotCache, positions_S: Tensor, longest: int) -> None:
        self.cache = cache
        self.positions_S = positions_S
        self.width = min(round_up_to_bucket(longest + 1), cache.max_length)
        steps_L = torch.arange(self.width, device=positions_S.device)
        hidden_SL = steps_L[None, :] > positions_S[:, None]
        self.bias_S11L = torch.zeros(hidden_SL.shape, device=positions_S.device).masked_fill_(
            hidden_SL, float("-inf")
        )[:, None, None, :]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.cache.slots_S, :, self.positions_S] = key[:, :, 0]
        values[self.cache.slots_S, :, self.positions_S] = value[:, :, 0]
        max_num_seqs, num_heads, _, head_dim = query.shape
        grouped = query.view(max_num_seqs, key.shape[1], -1, head_dim)
        scores = grouped @ keys[:, :, : self.width].transpose(2, 3)
        weights = torch.softmax(scores.float() * scale + self.bias_S11L, dim=-1).to(query.dtype)
        attended = weights @ values[:, :, : self.width]
        return attended.reshape(max_num_seqs, 1, num_heads, head_dim)
