"""Keys and values in pages of a fixed memory, and attention of new chunks to their sequences.

A sequence's pages lie anywhere, and sequences may share some. Which sequence holds which page is
decided in `areal_flow.generation.pages`.

Letters: N chunks, T packed tokens, U places that they are written to, Q padded chunk length,
L padded length, P pages, W pages of the longest sequence, H heads, K key-value heads, D head
dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_flow.models import segments
from areal_flow.models.attention import AttentionRule, KeyValues, attend_where_visible
from areal_flow.models.policy import run_policy
from areal_flow.models.segments import Segments


def page_tokens_for(max_model_len: int) -> int:
    """Larger pages waste more of each sequence's last one; smaller ones are slower to multiply.

    Measured on one core, 16 to 64 dimensions a head: 32 is quicker for contexts of a page or two.
    """
    return 32 if max_model_len <= 256 else 64


MAX_SCORES = 1 << 22
"""Scores of one head that a padded batch of chunks may have, so that its mask stays small."""

_SHORT = 32
"""Chunks of up to so many tokens are always padded to each other."""

Pages = NDArray[np.int64]


class PagedCache:
    """Keys and values of `P` pages, allocated once: `[P, K, page_tokens, D]` by layer."""

    def __init__(
        self, like: KeyValues, *, num_pages: int, page_tokens: int, device: torch.device
    ) -> None:
        self.page_tokens = page_tokens
        self.layers = {
            layer: [t.new_zeros((num_pages, t.shape[1], page_tokens, t.shape[3])) for t in pair]
            for layer, pair in like.items()
        }
        self.device = device

    def copy_page(self, source: int, targets: list[int], num_tokens: int) -> None:
        for pair in self.layers.values():
            for pages in pair:
                pages[targets, :, :num_tokens] = pages[source, :, :num_tokens]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence that follow what its pages have already."""

    tokens: NDArray[np.int64]
    start: int
    """Tokens before them."""
    pages: Pages
    """Of the sequence, in its order, with room for these tokens."""
    copies: Sequence[Pages] = ()
    """Of other sequences with the same tokens so far: they get the same keys and values."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def paged_cache(policy: Any, *, num_pages: int, page_tokens: int) -> PagedCache:
    one_11 = torch.zeros((1, 1), dtype=torch.int64, device=policy.device)
    like = KeyValues()
    run_policy(policy, one_11, one_11, like, 1)
    return PagedCache(like, num_pages=num_pages, page_tokens=page_tokens, device=policy.device)


def prefill(policy: Any, cache: PagedCache, chunks: Sequence[Chunk]) -> Tensor:
    """Write chunks of sequences to their pages; return logits `[N, V]` after each last token."""
    return _prefill(policy, chunks, ChunkLayout(cache, chunks))


def fill_pages(policy: Any, cache: PagedCache, chunks: Sequence[Chunk]) -> None:
    """As `prefill`, without the logits, and so without most of the last layer."""
    with suppress(_PagesAreFilled):
        _prefill(policy, chunks, ChunkLayout(cache, chunks, needs_logits=False))


def _prefill(policy: Any, chunks: Sequence[Chunk], layout: ChunkLayout) -> Tensor:
    packed_T = torch.from_numpy(np.concatenate([chunk.tokens for chunk in chunks]))
    input_ids_1T = packed_T.to(policy.device)[None, :]
    return run_policy(policy, input_ids_1T, layout.position_ids, layout, layout.last_N)[0]


class _PagesAreFilled(Exception):
    """Ends a pass after its last keys and values."""


class ChunkLayout:
    """Chunks packed into one row `[1, T]`, each against its own sequence's pages.

    All new keys and values are written before any are read, so that a chunk sees what another one
    of the same pass writes to a page that both hold.
    """

    def __init__(
        self, cache: PagedCache, chunks: Sequence[Chunk], *, needs_logits: bool = True
    ) -> None:
        """Without `needs_logits` a pass ends by `_PagesAreFilled` after its last values."""
        self.cache = cache
        self._ends_after = None if needs_logits else max(cache.layers)
        positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
        paged = [
            chunk.pages[at // cache.page_tokens]
            for chunk, at in zip(chunks, positions, strict=True)
        ]
        position_T = np.concatenate(positions)
        self.position_ids = self._tensor(position_T)[None, :]
        ends = np.cumsum([len(at) for at in positions])
        self.last_N = self._tensor(ends - 1)
        starts = ends - [len(at) for at in positions]
        copied = [
            (copy[at // cache.page_tokens], np.arange(begin, begin + len(at)))
            for chunk, at, begin in zip(chunks, positions, starts, strict=True)
            for copy in chunk.copies
        ]
        from_U = np.concatenate([np.arange(len(position_T)), *(tokens for _, tokens in copied)])
        self._page_U = self._tensor(np.concatenate([*paged, *(pages for pages, _ in copied)]))
        self._offset_U = self._tensor(position_T[from_U] % cache.page_tokens)
        self._from_U = self._tensor(from_U) if copied else slice(None)
        self._segments: Segments | None = None
        if segments.has_kernels(cache.device):
            self._segments, self._seen_K = self._by_segment(chunks)
        else:
            self._batches = [
                self._batch([chunks[i] for i in batch], starts[batch]) for batch in _batches(chunks)
            ]

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.cache.device)

    def _by_segment(self, chunks: Sequence[Chunk]) -> tuple[Segments, tuple[Tensor, slice, Tensor]]:
        """Return the segments of chunks, and where in the pages the keys of all of them are."""
        lengths = [len(chunk.tokens) for chunk in chunks], [chunk.end for chunk in chunks]
        at = [np.arange(chunk.end) for chunk in chunks]
        pages = [
            chunk.pages[each // self.cache.page_tokens]
            for chunk, each in zip(chunks, at, strict=True)
        ]
        offset_K = self._tensor(np.concatenate(at) % self.cache.page_tokens)
        seen_K = (self._tensor(np.concatenate(pages)), slice(None), offset_K)
        return Segments(*lengths, self.cache.device), seen_K

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
            cached[self._page_U, :, self._offset_U] = new[0].transpose(0, 1)[self._from_U]
        if layer == self._ends_after:
            raise _PagesAreFilled
        packed_THD = query[0].transpose(0, 1)
        if self._segments is not None:
            keys, values = (pages[self._seen_K] for pages in self.cache.layers[layer])
            return self._segments.attend(packed_THD, keys, values, rule)[None]
        attended_THD = value.new_empty((*packed_THD.shape[:2], value.shape[-1]))
        for batch in self._batches:
            keys, values = (batch.unpaged(pages) for pages in self.cache.layers[layer])
            gather = batch.gather_NQ.flatten()
            rows = packed_THD.index_select(0, gather)
            rows = rows.view(*batch.gather_NQ.shape, *rows.shape[1:])
            found = attend_where_visible(
                rows.transpose(1, 2), keys, values, batch.positions_NQ, rule
            )
            real = found.transpose(1, 2).flatten(0, 1).index_select(0, batch.real)
            attended_THD.index_copy_(0, gather[batch.real], real)
        return attended_THD[None]


@dataclass(frozen=True, slots=True)
class _ChunkBatch:
    """Chunks of similar length: where their pages, their tokens and their real tokens are."""

    pages_NW: Tensor
    gather_NQ: Tensor
    positions_NQ: Tensor
    real: Tensor

    def unpaged(self, pages: Tensor) -> Tensor:
        gathered = pages.index_select(0, self.pages_NW.flatten())
        by_chunk = gathered.view(*self.pages_NW.shape, *gathered.shape[1:])
        return by_chunk.transpose(1, 2).flatten(2, 3)


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
