"""One attention function for every Hugging Face policy, steered by a layout object.

A layout decides what a token may see: `PackedLayout` serves training (sequences side by side in one
row), `Prefix` serves prompts (their keys and values are kept), and `DecodeLayout` serves
sampling (one token a slot against the cache). A model that asks for more than scaled, causal,
windowed and soft-capped attention is refused, because to ignore what it asks for would change its
numbers.

The module refuses to know what the tokens mean, which policy runs, or whether gradients flow.

Letters: N rows or sequences, S slots, T packed tokens, L padded length, H heads, K key-value heads,
D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from areal_flow.errors import ModelError
from areal_flow.models.huggingface import AttentionInterface

ATTENTION_NAME = "areal_flow"

LENGTH_BUCKET = 16
"""Attention lengths are rounded up to this many tokens: other widths change CPU kernels' sums."""

_HARMLESS = frozenset({"position_ids", "use_cache", "cache_position"})
"""Keyword arguments of models that say what a layout knows already."""

_CALLED = {"s_aux": "sinks (s_aux)", "attention_mask": "a mask of the model's own"}


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """What one layer's scores go through before the softmax."""

    scale: float
    window: int | None = None
    """A token sees itself and the `window - 1` tokens before it; None: all before it."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`; None: they stay."""

    def weights(self, scores: Tensor, hidden: Tensor) -> Tensor:
        """Return float32 attention weights of raw scores; `hidden` masks keys, and broadcasts."""
        scores = scores.float() * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)


class AttentionLayout(Protocol):
    """Decides which keys and values each query of a layer meets."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
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
    layout: AttentionLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Hand one layer's attention to the layout that came with the forward call.

    Attention dropout is left out: a policy's numbers must not depend on anything but its tokens.

    Raises:
        ModelError: the model asks for something that no layout does.
    """
    if layout is None:
        raise ModelError(
            f"{type(module).__name__} is not told the arguments of its model's forward"
        )
    _refuse_what_no_layout_does(module, {"attention_mask": attention_mask, **others})
    rule = AttentionRule(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return layout.attend(module.layer_idx, query, key, value, rule), None


def _refuse_what_no_layout_does(module: Any, arguments: Mapping[str, Any]) -> None:
    asked = [
        _CALLED.get(name, name)
        for name, value in arguments.items()
        if name not in _HARMLESS and value is not None and value is not False
    ]
    if not getattr(module, "is_causal", True):
        asked.append("attention to later tokens")
    if getattr(module, "layer_idx", None) is None:
        asked.append("layers without an index")
    if asked:
        raise ModelError(
            f"{type(module).__name__} asks for attention with {', '.join(sorted(asked))}: choose a "
            "model with plain, windowed or soft-capped causal attention"
        )


AttentionInterface.register(ATTENTION_NAME, attend_by_layout)


def attend_causally(query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
    """Return values `[N, H, L, D]` of rows that start at their first token.

    `query` is `[N, H, L, D]`; `key` and `value` are `[N, K, L, D]`.
    """
    length = query.shape[2]
    windowed = rule.window is not None and rule.window < length
    steps_L = torch.arange(length, device=query.device)
    hidden_LL = _hidden(steps_L[None, :], steps_L[:, None], rule.window)
    if rule.softcap is None:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=~hidden_LL if windowed else None,
            is_causal=not windowed,
            scale=rule.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    repeats = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    return rule.weights(query @ keys.transpose(2, 3), hidden_LL).to(query.dtype) @ values


def _hidden(keys: Tensor, queries: Tensor, window: int | None) -> Tensor:
    """Return which positions of keys are hidden from which positions of queries."""
    later = keys > queries
    return later if window is None else later | (keys <= queries - window)


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

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        attended = attend_causally(
            self._unfold(query), self._unfold(key), self._unfold(value), rule
        )
        return attended.transpose(1, 2).flatten(0, 1).index_select(0, self.scatter_T)[None]


class Prefix(dict[int, tuple[Tensor, Tensor]]):
    """Rows of right-padded prefixes: keeps their keys and values, `[N, K, L, D]` by layer."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        self[layer] = (key, value)
        return attend_causally(query, key, value, rule).transpose(1, 2)


class SlotCache:
    """Keys and values of `S` slots, allocated once: `[S, K, L, D]` by layer."""

    def __init__(self, like: Prefix, *, max_num_seqs: int, max_length: int) -> None:
        """Allocate for the layers, heads, types and device of any prefix of the same policy."""
        self.max_length = round_up_to_bucket(max_length)
        self.layers = {
            layer: [
                t.new_zeros((max_num_seqs, t.shape[1], self.max_length, t.shape[3])) for t in pair
            ]
            for layer, pair in like.items()
        }
        self.slots_S = torch.arange(max_num_seqs, device=like[min(like)][0].device)

    def copy_prefix(self, prefix: Prefix, row: int, slots: list[int]) -> None:
        """Give each of `slots` its own copy of one prefilled row."""
        for layer, pair in prefix.items():
            for cached, prefilled in zip(self.layers[layer], pair, strict=True):
                cached[slots, :, : prefilled.shape[2]] = prefilled[row]


class DecodeLayout:
    """One new token in every slot, written at its position, against that slot's cache.

    All `S` rows always take part, idle ones with garbage that nobody reads, and the cache is cut
    at a multiple of `LENGTH_BUCKET`: so a completion's numbers do not depend on its neighbours.
    """

    def __init__(self, cache: SlotCache, positions_S: Tensor, longest: int) -> None:
        self.cache = cache
        self.positions_S = positions_S
        self.width = min(round_up_to_bucket(longest + 1), cache.max_length)
        self._hidden_by_window: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        for cached, new in zip(self.cache.layers[layer], (key, value), strict=True):
            cached[self.cache.slots_S, :, self.positions_S] = new[:, :, 0]
        keys, values = (cached[:, :, : self.width] for cached in self.cache.layers[layer])
        max_num_seqs, num_heads, _, head_dim = query.shape
        grouped = query.view(max_num_seqs, key.shape[1], -1, head_dim)
        scores = grouped @ keys.transpose(2, 3)
        weights = rule.weights(scores, self._hidden(rule.window)).to(query.dtype)
        return (weights @ values).reshape(max_num_seqs, 1, num_heads, -1)

    def _hidden(self, window: int | None) -> Tensor:
        if window not in self._hidden_by_window:
            steps_L = torch.arange(self.width, device=self.positions_S.device)
            hidden_SL = _hidden(steps_L[None, :], self.positions_S[:, None], window)
            self._hidden_by_window[window] = hidden_SL[:, None, None, :]
        return self._hidden_by_window[window]
