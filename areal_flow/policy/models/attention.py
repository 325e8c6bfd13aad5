"""One attention function for every Hugging Face policy, steered by a layout object.

A layout decides what a token may see. `packed_layout` serves training, `paged` sampling. A model
that needs more than scaled, causal, windowed and soft-capped attention, with or without sinks, is
refused, since ignoring the rest would change its numbers.

Letters: N rows or sequences, T packed tokens, L padded length, Q queries of a row, H heads,
K key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from areal_flow.core.errors import ModelError
from areal_flow.policy.models.huggingface import AttentionInterface

ATTENTION_NAME = "areal_flow"

IGNORED_KWARGS = frozenset({"position_ids", "use_cache", "cache_position"})
"""Arguments that models pass to attention, and that a layout has already."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRule:
    """How one layer's scores become attention weights."""

    scale: float
    window: int | None = None
    """A token sees itself and the `window - 1` tokens before it; None: all tokens before it."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`; None: they are not capped."""
    sinks: Tensor | None = None
    """A score of each head `[H]` that takes part in the softmax without a value."""

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None

    def weights(self, scores: Tensor, hidden: Tensor) -> Tensor:
        """Return float32 attention weights of raw scores; `hidden` masks keys, and broadcasts."""
        scores = scores.float() * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is None:
            return scores.softmax(dim=-1)
        sinks = self.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]


def pass_dtype(tensor: Tensor) -> torch.dtype:
    """Return the type of a pass's products: autocast's, or else the tensor's own."""
    device = tensor.device.type
    autocast = torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else tensor.dtype


class AttentionLayout(Protocol):
    """Decides which keys and values each query of a layer attends to."""

    position_ids: Tensor
    """Position of each token in its sequence, `[N, T]`."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Return values `[N, T, H, D]` for `query [N, H, T, D]`, `key, value [N, K, T, D]`."""


class RowLayout(AttentionLayout, Protocol):
    """The layout of sequences side by side in one row, or in a slice of it."""

    places: Sequence[NDArray[np.int64]]
    """The places of each sequence's tokens in the row, also if this is a slice of it."""


def attend_by_layout(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: AttentionLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Pass one layer's attention to the layout of the forward call.

    There is no attention dropout: a policy's numbers must depend on its tokens alone.
    """
    if layout is None:
        raise ModelError(
            f"{type(module).__name__} did not receive `layout`: its model drops keyword arguments"
        )
    _refuse_unsupported(module, {"a mask of the model's own": attention_mask, **others})
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = AttentionRule(scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    return layout.attend(module.layer_idx, query, key, value, rule), None


def _refuse_unsupported(module: Any, arguments: Mapping[str, Any]) -> None:
    unsupported = [
        name
        for name, value in arguments.items()
        if name not in IGNORED_KWARGS and value is not None and value is not False
    ]
    if not getattr(module, "is_causal", True):
        unsupported.append("attention to later tokens")
    if getattr(module, "layer_idx", None) is None:
        unsupported.append("layers without an index")
    if unsupported:
        raise ModelError(
            f"{type(module).__name__} needs {', '.join(sorted(unsupported))}: choose a model with "
            "plain, windowed or soft-capped causal attention, with or without sinks"
        )


AttentionInterface.register(ATTENTION_NAME, attend_by_layout)


def attend_causally(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
    """Return values `[N, H, L, D]` of rows that begin with their first token.

    `query` is `[N, H, L, D]`; `key` and `value` are `[N, K, L, D]`.
    """
    length = query.shape[2]
    if rule.is_plain and (rule.window is None or rule.window >= length):
        return _fused(query, key, value, rule, is_causal=True)
    steps_1L = torch.arange(length, device=query.device)[None, :]
    return attend_where_visible(query, key, value, steps_1L, rule)


def attend_where_visible(
    query: Tensor, key: Tensor, value: Tensor, positions_NQ: Tensor, rule: AttentionRule
) -> Tensor:
    """Return values `[N, H, Q, D]` of queries at any positions of their rows.

    `query` is `[N, H, Q, D]`; `key` and `value` are `[N, K, L, D]`, from the row's first token on.
    """
    keys_L = torch.arange(key.shape[2], device=query.device)
    queries_NQ1 = positions_NQ[:, :, None]
    hidden_N1QL = (keys_L > queries_NQ1)[:, None]
    if rule.window is not None:
        hidden_N1QL |= (keys_L <= queries_NQ1 - rule.window)[:, None]
    if rule.is_plain:
        return _fused(query, key, value, rule, attn_mask=~hidden_N1QL)
    repeats = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    return rule.weights(query @ keys.transpose(2, 3), hidden_N1QL).to(query.dtype) @ values


def _fused(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, **mask: Any) -> Tensor:
    repeats = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, scale=rule.scale, enable_gqa=repeats, **mask
    )


def to_device(values: NDArray[Any], device: torch.device | str) -> Tensor:
    """Return an array as a tensor on a device, without waiting; a CPU tensor shares its memory.

    To a GPU it is copied from pinned memory, on another stream than the one that computes.
    """
    tensor, device = torch.from_numpy(values), torch.device(device)
    if device.type != "cuda":
        return tensor.to(device)
    copying, computing = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copying):
        moved = tensor.pin_memory().to(device, non_blocking=True)
    computing.wait_stream(copying)
    moved.record_stream(computing)  # or a later copy would get its memory while it is in use
    return moved


def to_host(values: Tensor) -> Tensor:
    """Return a device's numbers in main memory, as float64; this waits for the device."""
    return values.double().cpu()


@lru_cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
