"""Keys and values in pages of a fixed memory, and attention over each sequence's own pages.

A sequence's pages lie anywhere, and sequences may share some. Scores are computed page by page,
where the pages lie: a sequence costs what its own length costs, and only new tokens are copied.

The module refuses to know which sequence holds which page; see `areal_flow.generation.pages`.

Letters: N chunks, T packed tokens, Q padded chunk length, L padded length, P pages, S rows that
decode, M rows that share a page, R pairs of a row with one of its pages, W pages of the longest
sequence, H heads, K key-value heads, G heads to each of those, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

from areal_flow.models.attention import AttentionRule, KeyValues, attend_where_visible


def page_tokens_for(max_model_len: int) -> int:
    """Return how many tokens a page has, for sequences of up to so many.

    Larger pages waste more of each sequence's last one; smaller ones are slower to multiply.
    Measured on one core, 16 to 64 dimensions a head: 32 is quicker for contexts of a page or two.
    """
    return 32 if max_model_len <= 256 else 64


MAX_SCORES = 1 << 22
"""Scores of one head that a padded batch of chunks may have, so that its mask stays small."""

_SHORT = 32
"""Chunks of up to so many tokens are always padded to each other."""

_MIN_FILL = 0.5
"""Below this share of pages in use, those in use are copied together before they are multiplied."""

Pages = NDArray[np.int64]


class PagedCache:
    """Keys and values of `P` pages, allocated once: `[P, K, page_tokens, D]` by layer."""

    def __init__(
        self, like: KeyValues, *, num_pages: int, page_tokens: int, device: torch.device
    ) -> None:
        """Allocate for the layers, heads and types of any pass of the same policy."""
        self.page_tokens = page_tokens
        self.layers = {
            layer: [t.new_zeros((num_pages, t.shape[1], page_tokens, t.shape[3])) for t in pair]
            for layer, pair in like.items()
        }
        self.device = device

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        """Give each target page what its source has."""
        for pair in self.layers.values():
            for pages in pair:
                pages[targets] = pages[sources]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence that follow what its pages have already."""

    tokens: NDArray[np.int64]
    start: int
    """Tokens before them."""
    pages: Pages
    """Of the sequence, in its order, with room for these tokens."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class ChunkLayout:
    """Chunks packed into one row `[1, T]`, each against its own sequence's pages.

    All new keys and values are written before any are read, so that a chunk sees what another one
    of the same pass writes to a page that both hold.
    """

    def __init__(self, cache: PagedCache, chunks: Sequence[Chunk]) -> None:
        self.cache = cache
        positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
        paged = [
            chunk.pages[at // cache.page_tokens]
            for chunk, at in zip(chunks, positions, strict=True)
        ]
        position_T = np.concatenate(positions)
        self.position_ids = self._tensor(position_T)[None, :]
        self._page_T = self._tensor(np.concatenate(paged))
        self._offset_T = self._tensor(position_T % cache.page_tokens)
        ends = np.cumsum([len(at) for at in positions])
        self.last_N = self._tensor(ends - 1)
        starts = ends - [len(at) for at in positions]
        self._batches = [
            self._batch([chunks[i] for i in batch], starts[batch]) for batch in _batches(chunks)
        ]

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.cache.device)

    def _batch(self, chunks: list[Chunk], starts_N: NDArray[np.int64]) -> _ChunkBatch:
        lengths_N1 = np.array([[len(chunk.tokens)] for chunk in chunks])
        steps_Q = np.arange(lengths_N1.max())
        page_tokens = self.cache.page_tokens
        width = -(-max(chunk.end for chunk in chunks) // page_tokens)
        pages_NW = np.zeros((len(chunks), width), np.int64)
        for row_W, chunk in zip(pages_NW, chunks, strict=True):
            held = -(-chunk.end // page_tokens)
            row_W[:held] = chunk.pages[:held]
        gather_NQ = starts_N[:, None] + np.minimum(steps_Q, lengths_N1 - 1)
        positions_NQ = np.array([[chunk.start] for chunk in chunks]) + steps_Q
        real_NQ = steps_Q < lengths_N1
        real = real_NQ.flatten().nonzero()[0]
        return _ChunkBatch(*map(self._tensor, (pages_NW, gather_NQ, positions_NQ, real)))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        for cached, new in zip(self.cache.layers[layer], (key, value), strict=True):
            cached[self._page_T, :, self._offset_T] = new[0].transpose(0, 1)
        packed_THD = query[0].transpose(0, 1)
        attended_THD = value.new_empty((*packed_THD.shape[:2], value.shape[-1]))
        for batch in self._batches:
            keys, values = (batch.unpaged(pages) for pages in self.cache.layers[layer])
            queries = packed_THD[batch.gather_NQ].transpose(1, 2)
            found = attend_where_visible(queries, keys, values, batch.positions_NQ, rule)
            rows = batch.gather_NQ.flatten()[batch.real]
            attended_THD[rows] = found.transpose(1, 2).flatten(0, 1)[batch.real]
        return attended_THD[None]


@dataclass(frozen=True, slots=True)
class _ChunkBatch:
    """Chunks of similar length: where their pages, their tokens and their real tokens are."""

    pages_NW: Tensor
    gather_NQ: Tensor
    positions_NQ: Tensor
    real: Tensor

    def unpaged(self, pages: Tensor) -> Tensor:
        """Return `[N, K, L, D]` of the chunks' sequences."""
        return pages[self.pages_NW].transpose(1, 2).flatten(2, 3)


def _batches(chunks: Sequence[Chunk]) -> list[list[int]]:
    """Return indices of chunks that are padded to each other: at most half as long again."""
    by_length = sorted(range(len(chunks)), key=lambda i: (chunks[i].end, len(chunks[i].tokens)))
    batches: list[list[int]] = []
    shortest = longest = num_queries = 0
    for i in by_length:
        longest, num_queries = chunks[i].end, max(num_queries, len(chunks[i].tokens))
        if not batches or not (
            longest <= max(1.5 * shortest, _SHORT)
            and (len(batches[-1]) + 1) * num_queries * longest <= MAX_SCORES
        ):
            batches.append([])
            shortest, num_queries = longest, len(chunks[i].tokens)
        batches[-1].append(i)
    return batches


class PagedDecodeLayout:
    """One new token a row, written to the row's last page, against all of the row's pages."""

    def __init__(
        self,
        cache: PagedCache,
        tables_SW: Pages,
        positions_S: NDArray[np.int64],
        *,
        as_it_lies: bool = True,
    ) -> None:
        """Find what each row reads.

        Args:
            cache: of the policy.
            tables_SW: pages of each row, in its order.
            positions_S: where each row's new token goes.
            as_it_lies: whether pages may be read where they are and once for all rows that share
                them. Without, a row's sums do not depend on which other rows there are.
        """
        self.cache = cache
        self._num_rows = len(positions_S)
        last_S = positions_S // cache.page_tokens
        self._page_S = self._tensor(tables_SW[np.arange(self._num_rows), last_S])
        self._offset_S = self._tensor(positions_S % cache.page_tokens)
        held_SW = np.arange(last_S.max() + 1) <= last_S[:, None]
        rows_R, ordinals_R = held_SW.nonzero()
        pages_R = tables_SW[:, : held_SW.shape[1]][held_SW]
        ends_R = positions_S[rows_R] + 1 - ordinals_R * cache.page_tokens
        if as_it_lies:
            self._parts, place_R = _where_they_lie(pages_R, rows_R, ends_R)
        else:
            place_R = np.arange(len(pages_R))
            self._parts = [_Part(pages_R, rows_R[:, None], ends_R[:, None])]
        num_places = sum(part.rows_PM.size for part in self._parts)
        places_SW = np.full(held_SW.shape, num_places)
        places_SW[held_SW] = place_R
        self._places_SW = self._tensor(places_SW)
        self._place_R = self._tensor(place_R)
        self._first_S = self._tensor(np.concatenate(([0], np.cumsum(last_S + 1)[:-1])))
        self._read = [_ReadPart(part, cache.device) for part in self._parts]

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.cache.device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        for cached, new in zip(self.cache.layers[layer], (key, value), strict=True):
            cached[self._page_S, :, self._offset_S] = new[:, :, 0]
        keys, values = self.cache.layers[layer]
        num_rows, num_heads = query.shape[:2]
        query_SKGD = query.view(num_rows, key.shape[1], -1, query.shape[-1])
        scores = [part.scores(query_SKGD, keys, rule) for part in self._read]
        largest_SH = self._largest(scores)
        sums = [
            part.sums(each, largest_SH, values)
            for part, each in zip(self._read, scores, strict=True)
        ]
        sums_RC = sums[0] if len(sums) == 1 else torch.cat(sums)
        sums_SC = embedding_bag(self._place_R, sums_RC, self._first_S, mode="sum")
        weighted = sums_SC[:, num_heads:].view(num_rows, 1, num_heads, -1)
        return (weighted / sums_SC[:, None, :num_heads, None]).to(query.dtype)

    def _largest(self, scores: list[Tensor]) -> Tensor:
        """Return each row's largest score `[S, H]`."""
        largest = [part.largest(each) for part, each in zip(self._read, scores, strict=True)]
        nothing_1H = largest[0].new_full((1, largest[0].shape[1]), float("-inf"))
        return torch.cat((*largest, nothing_1H))[self._places_SW].amax(dim=1)


@dataclass(frozen=True, slots=True)
class _Part:
    """Pages that are read in one product, each with as many rows as hold it, padded to M.

    `ends_PM` is how many tokens of the page its row has; 0 or less for padding.
    """

    pages_P: Pages | None
    """None: all pages from the first one on."""
    rows_PM: NDArray[np.int64]
    ends_PM: NDArray[np.int64]


def _where_they_lie(
    pages_R: Pages, rows_R: NDArray[np.int64], ends_R: NDArray[np.int64]
) -> tuple[list[_Part], NDArray[np.int64]]:
    """Return the products that read each page once, and each pair's place in their results."""
    num_pages = int(pages_R.max()) + 1
    holders_P = np.bincount(pages_R, minlength=num_pages)
    alone_R = holders_P[pages_R] == 1
    alone, place_R = np.flatnonzero(alone_R), np.empty(len(pages_R), np.int64)
    parts = []
    if len(alone) >= _MIN_FILL * num_pages:
        pages, place_R[alone], size = None, pages_R[alone], num_pages
    else:
        pages, place_R[alone], size = pages_R[alone], np.arange(len(alone)), len(alone)
    if size:
        rows_P, ends_P = np.zeros((2, size), np.int64)
        rows_P[place_R[alone]], ends_P[place_R[alone]] = rows_R[alone], ends_R[alone]
        parts.append(_Part(pages, rows_P[:, None], ends_P[:, None]))
    if len(alone) < len(pages_R):
        shared = np.flatnonzero(~alone_R)
        shared = shared[np.argsort(pages_R[shared], kind="stable")]
        pages, first, holders = np.unique(pages_R[shared], return_index=True, return_counts=True)
        page = np.repeat(np.arange(len(pages)), holders)
        member = np.arange(len(shared)) - first[page]
        rows_PM, ends_PM = np.zeros((2, len(pages), int(holders.max())), np.int64)
        rows_PM[page, member], ends_PM[page, member] = rows_R[shared], ends_R[shared]
        place_R[shared] = size + page * rows_PM.shape[1] + member
        parts.append(_Part(pages, rows_PM, ends_PM))
    return parts, place_R


class _ReadPart:
    """The products of one part: scores, then sums of values, without those of other rows' keys."""

    def __init__(self, part: _Part, device: torch.device) -> None:
        self._device = device
        self._pages = None if part.pages_P is None else self._tensor(part.pages_P)
        self._num_pages, self._num_members = part.rows_PM.shape
        self._rows_R = self._tensor(part.rows_PM.flatten())
        self._ends_PM = part.ends_PM
        self._hidden: dict[int | None, Tensor] = {}

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def scores(self, query_SKGD: Tensor, keys: Tensor, rule: AttentionRule) -> Tensor:
        """Return float32 scores `[P, K, M * G, page_tokens]`, those of hidden keys -inf."""
        scores = (self._by_page(query_SKGD) @ self._read(keys).transpose(2, 3)).float()
        scale = rule.scale
        if rule.softcap is not None:
            scores, scale = torch.tanh(scores * (scale / rule.softcap)), rule.softcap
        num_pages, num_groups, _, page_tokens = scores.shape
        by_member = scores.view(num_pages, num_groups, self._num_members, -1, page_tokens)
        return torch.add(self._hide(rule.window, page_tokens), by_member, alpha=scale).flatten(2, 3)

    def largest(self, scores: Tensor) -> Tensor:
        """Return the largest score of each place `[R, H]`."""
        return self._by_place(scores.amax(dim=-1, keepdim=True))

    def sums(self, scores: Tensor, largest_SH: Tensor, values: Tensor) -> Tensor:
        """Return, for each place, sums of weights and of weighted values `[R, H + H * D]`."""
        largest = self._by_page(largest_SH.view(len(largest_SH), scores.shape[1], -1, 1))
        weights = scores.sub_(largest).exp_()
        weighted = (weights.to(values.dtype) @ self._read(values)).float()
        return torch.cat(
            [
                self._by_place(weights.sum(dim=-1, keepdim=True)),
                self._by_place(weighted),
            ],
            dim=1,
        )

    def _read(self, pages: Tensor) -> Tensor:
        return pages[: self._num_pages] if self._pages is None else pages[self._pages]

    def _by_page(self, rows_SKGD: Tensor) -> Tensor:
        """Return `[P, K, M * G, D]`: what each page's rows bring."""
        brought = rows_SKGD.index_select(0, self._rows_R)
        by_member = brought.view(self._num_pages, self._num_members, *brought.shape[1:])
        return by_member.transpose(1, 2).flatten(2, 3)

    def _by_place(self, found: Tensor) -> Tensor:
        """Return `[R, H * D]` of `[P, K, M * G, D]`."""
        num_pages, num_groups, _, size = found.shape
        by_member = found.view(num_pages, num_groups, self._num_members, -1, size)
        return by_member.transpose(1, 2).flatten(0, 1).flatten(1)

    def _hide(self, window: int | None, page_tokens: int) -> Tensor:
        """Return `[P, 1, M, 1, page_tokens]`: 0 where a row sees a page's token, else -inf."""
        if window not in self._hidden:
            steps, ends_PM1 = np.arange(page_tokens), self._ends_PM[:, :, None]
            hidden = steps >= ends_PM1
            if window is not None:
                hidden |= steps < ends_PM1 - window
            bias = np.where(hidden, np.float32("-inf"), np.float32(0))
            self._hidden[window] = self._tensor(bias[:, None, :, None, :])
        return self._hidden[window]
