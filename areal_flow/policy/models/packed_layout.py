"""Sequences packed into one row, with attention within each sequence, for training.

Letters: N sequences, T packed tokens, L padded length, H heads, K key-value heads, D head
dimension, R padded tokens of all groups, O tokens of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_flow.algorithms.gather import GatherIndex, deterministic_gather
from areal_flow.policy.models import segments
from areal_flow.policy.models.attention import AttentionRule, attend_causally, pass_dtype, to_device
from areal_flow.policy.models.segments import Segments

FREE_SCORES = 2**20
"""Scores of padding, of one head, that cost as much as another group of rows.

On a CPU the number should be far smaller, but float32 passes keep it, and so their bits.
"""

FREE_PRODUCTS = 2**22
"""The same for bfloat16 passes on a CPU, times the heads and a head's width."""


def group_by_length(
    lengths: Sequence[int], free_scores: int, *, padding: float = 0.05
) -> list[list[int]]:
    """Return the indices of rows that attend together, padded to the longest of them.

    Rows are grouped longest first, while the scores of padding are at most `padding` of the real
    ones, or `free_scores`. If there is only one group, it keeps the order of the rows.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    groups: list[list[int]] = []
    real = padded = 0
    for row in order:
        area = lengths[row] ** 2
        if groups:
            real += area
            padded += lengths[groups[-1][0]] ** 2 - area
        if not groups or padded > max(padding * real, free_scores):
            groups.append([])
            real, padded = area, 0
        groups[-1].append(row)
    return groups if len(groups) > 1 else [[*range(len(lengths))]]


class PackedLayout:
    """Sequences packed into one row `[1, T]`; no token sees another sequence's tokens.

    Sequences may share their first tokens, which are then in the row once, and all layers but
    attention compute them once (Prefix Grouper, arXiv 2506.05433). For attention the row is
    unfolded into rows `[N, L]` of sequences of about equal length. On a GPU only keys and values
    are unfolded, side by side, so shared tokens attend once, too.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        places: Sequence[NDArray[np.int64]] | None = None,
    ) -> None:
        """`places` has each sequence's positions in the row; None: one sequence after the other.

        A token that several sequences share has the same position in each of them.
        """
        ends = np.cumsum(lengths)
        self.places = places or [
            np.arange(end - n, end) for n, end in zip(lengths, ends, strict=True)
        ]
        position_T = np.zeros(max(places_L[-1] for places_L in self.places) + 1, np.int64)
        for places_L in self.places:
            position_T[places_L] = np.arange(len(places_L))
        self.position_ids = to_device(position_T[None, :], device)
        self._device = device
        self._segments: Segments | None = None
        if segments.has_fused_kernels(torch.device(device)):
            self._segments = Segments.of(self.places, device)
        self._unfoldings: dict[int, Unfolding] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        if self._segments is not None:
            query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
            return self._segments.attend(query, key, value, rule)[None]
        if value.device.type != "cpu" or pass_dtype(value) != torch.bfloat16:
            return self._attend_unfolded(query, key, value, rule, FREE_SCORES)
        # The backward pass of torch's kernel takes three times as long in bfloat16 (2.13).
        with torch.autocast("cpu", enabled=False):
            free_scores = FREE_PRODUCTS // (query.shape[1] * query.shape[3])
            attended = self._attend_unfolded(
                query.float(), key.float(), value.float(), rule, free_scores
            )
            return attended.to(value.dtype)

    def _attend_unfolded(
        self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule, free_scores: int
    ) -> Tensor:
        if len(self.places) == 1:
            return attend_causally(query, key, value, rule).transpose(1, 2)
        if free_scores not in self._unfoldings:
            self._unfoldings[free_scores] = Unfolding(self.places, free_scores, self._device)
        query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
        return self._unfoldings[free_scores].attend(query, key, value, rule)[None]


class Unfolding:
    """Copies a packed row to padded rows of one sequence each, and sums their gradients."""

    def __init__(
        self,
        places: Sequence[NDArray[np.int64]],
        free_scores: int,
        device: torch.device | str = "cpu",
    ) -> None:
        lengths = np.array([len(places_L) for places_L in places])
        self.shapes: list[tuple[int, int]] = []
        """`(N, L)` of each group of sequences."""
        gathered, is_real = [], []
        for group in group_by_length(lengths.tolist(), free_scores):
            real_NL = np.arange(lengths[group].max()) < lengths[group][:, None]
            gather_NL = np.zeros(real_NL.shape, np.int64)
            gather_NL[real_NL] = np.concatenate([places[row] for row in group])
            gathered.append(gather_NL.ravel())
            is_real.append(real_NL.ravel())
            self.shapes.append(real_NL.shape)
        gather_R = np.concatenate(gathered)
        real_R = np.flatnonzero(np.concatenate(is_real))
        owners_O = real_R[np.argsort(gather_R[real_R], kind="stable")]
        first_T = np.searchsorted(gather_R[owners_O], np.arange(gather_R.max() + 1))
        tensor = partial(to_device, device=device)
        # Padding reads the row's first token, and gives it no gradient.
        self.gather = GatherIndex(tensor(gather_R), tensor(owners_O), tensor(first_T))
        self.scatter_T = tensor(owners_O[first_T])
        """For each token of the row, its place among the `R` in the first sequence that has it."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Return values `[T, H, D]` for `query [T, H, D]`, and for keys and values `[T, K, D]`."""
        unfolded = (self.rows_of(packed) for packed in (query, key, value))
        attended = [
            attend_causally(query_NHLD, key_NKLD, value_NKLD, rule).transpose(1, 2).flatten(0, 1)
            for query_NHLD, key_NKLD, value_NKLD in zip(*unfolded, strict=True)
        ]
        rows_RHD = attended[0] if len(attended) == 1 else torch.cat(attended)
        return rows_RHD.index_select(0, self.scatter_T)

    def rows_of(self, packed_THD: Tensor) -> list[Tensor]:
        """Return the rows `[N, H, L, D]` of each group."""
        rows_RHD = deterministic_gather(packed_THD, self.gather)
        parts = torch.split(rows_RHD, [rows * length for rows, length in self.shapes])
        return [
            torch.unflatten(part, 0, shape).transpose(1, 2)
            for part, shape in zip(parts, self.shapes, strict=True)
        ]
