"""One attention function for every Hugging Face policy, steered by a layout object.

A layout decides what a token may see. `PackedLayout` serves training: sequences side by side in one
row. Sampling has layouts of its own in `paged_prefill` and `paged_decode`. A model that asks for
more than scaled, causal, windowed and soft-capped attention is refused, because to ignore what it
asks for would change its numbers.

The module refuses to know what the tokens mean, which policy runs, or whether gradients flow.

Letters: N rows or sequences, T packed tokens, L padded length, Q queries of a row, H heads,
K key-value heads, D head dimension, R padded tokens of all groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from areal_flow.errors import ModelError
from areal_flow.models.huggingface import AttentionInterface

ATTENTION_NAME = "areal_flow"

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


class RowLayout(AttentionLayout, Protocol):
    """The layout of sequences side by side in one row, or in a slice of it."""

    lengths: Sequence[int]
    """Tokens of each sequence of the whole row."""
    position_ids: Tensor
    """Of each token within its sequence, `[1, T]`."""


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
    if rule.softcap is None and (rule.window is None or rule.window >= length):
        return scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=rule.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
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
    if rule.softcap is None:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=~hidden_N1QL,
            scale=rule.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    repeats = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    return rule.weights(query @ keys.transpose(2, 3), hidden_N1QL).to(query.dtype) @ values


FREE_SCORES = 2**20
"""Scores of padding, of one head, that cost no more than another group of rows does."""


def group_by_length(lengths: Sequence[int], *, padding: float = 0.05) -> list[list[int]]:
    """Return rows that attend together, padded to the longest of them.

    Longest first; a group takes the next row while the scores of padding are at most `padding` of
    its real ones, or `FREE_SCORES`.

    Args:
        lengths: tokens of each row.
        padding: scores of padding that a group may have, as a share of its real ones.

    Returns:
        The indices of each group's rows; in their own order if all are one group.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    groups: list[list[int]] = []
    real = padded = 0
    for row in order:
        area = lengths[row] ** 2
        if groups:
            real += area
            padded += lengths[groups[-1][0]] ** 2 - area
        if not groups or padded > max(padding * real, FREE_SCORES):
            groups.append([])
            real, padded = area, 0
        groups[-1].append(row)
    return groups if len(groups) > 1 else [[*range(len(lengths))]]


class PackedLayout:
    """Sequences packed into one row `[1, T]`; no token sees another sequence's tokens.

    The row is unfolded for the attention alone, to `[N, L]` of each group of sequences that are
    about as long as each other. So its cost is that of the sequences' own lengths.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.lengths = lengths
        lengths_N = torch.tensor(lengths)
        starts_N = lengths_N.cumsum(0) - lengths_N
        self._gathers_NL: list[Tensor] = []
        """Of each group: where its rows' tokens lie; the first token stands for padding."""
        places: list[Tensor] = []
        for group in group_by_length(lengths):
            steps_L = torch.arange(max(lengths[row] for row in group))
            real_NL = steps_L[None, :] < lengths_N[group][:, None]
            tokens_NL = starts_N[group][:, None] + steps_L[None, :]
            self._gathers_NL.append(torch.where(real_NL, tokens_NL, 0).to(device))
            places.append(torch.where(real_NL, tokens_NL, -1).flatten())
        place_R = torch.cat(places)
        rows_R = (place_R >= 0).nonzero().squeeze(1)
        self._scatter_T = torch.empty_like(rows_R)
        self._scatter_T[place_R[rows_R]] = rows_R
        self._scatter_T = self._scatter_T.to(device)
        positions = [torch.arange(length) for length in lengths]
        self.position_ids = torch.cat(positions)[None, :].to(device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        attended = [
            self._attend(gather_NL, query, key, value, rule) for gather_NL in self._gathers_NL
        ]
        rows = attended[0] if len(attended) == 1 else torch.cat(attended)
        return rows.index_select(0, self._scatter_T)[None]

    @staticmethod
    def _attend(
        gather_NL: Tensor, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Return the values `[R, H, D]` of one group's rows, padding among them."""
        rows = (_rows(packed, gather_NL) for packed in (query, key, value))
        query_NHLD, key_NKLD, value_NKLD = rows
        attended = attend_causally(query_NHLD, key_NKLD, value_NKLD, rule)
        return attended.transpose(1, 2).flatten(0, 1)


def _rows(packed: Tensor, gather_NL: Tensor) -> Tensor:
    """Return the rows `[N, H, L, D]` of a packed row `[1, H, T, D]`."""
    rows = packed[0].transpose(0, 1).index_select(0, gather_NL.flatten())
    return rows.view(*gather_NL.shape, *rows.shape[1:]).transpose(1, 2)


class KeyValues(dict[int, tuple[Tensor, Tensor]]):
    """Rows from their first tokens on: keeps keys and values of a pass, `[N, K, L, D]` by layer."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        self[layer] = (key, value)
        return attend_causally(query, key, value, rule).transpose(1, 2)
