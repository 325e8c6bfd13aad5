"""Keys and values in pages of a fixed memory, and attention of new chunks to their sequences.

A sequence's pages lie anywhere, and sequences may share some. Which sequence holds which page is
decided in `areal_flow.rollout.engines.pages`.

Letters: N chunks, T packed tokens, U places that they are written to, Q padded chunk length,
L padded length, P pages, W pages of the longest sequence, H heads, K key-value heads, D head
dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_flow.policy.models import segments
from areal_flow.policy.models.attention import (
    AttentionRule,
    attend_causally,
    attend_where_visible,
    to_device,
)
from areal_flow.policy.models.policy import run_policy
from areal_flow.policy.models.segments import Segments


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

Places = tuple[Tensor, slice, Tensor]
"""The page of each token, all heads, and its place in the page: an index of a layer's pages."""


class PagedCache:
    """Keys and values of `P` pages, allocated once: `[P, K, page_tokens, D]` by layer."""

    def __init__(self, policy: Any, *, num_pages: int, page_tokens: int) -> None:
        """Run a policy over one token to know its layers."""
        self.page_tokens = page_tokens
        self.device = policy.device
        self.layers: dict[int, list[Tensor]] = {}
        self._num_pages = num_pages
        self.position_ids = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        run_policy(policy, self.position_ids, self, 1)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        self.layers[layer] = [
            each.new_zeros((self._num_pages, each.shape[1], self.page_tokens, each.shape[3]))
            for each in (key, value)
        ]
        return attend_causally(query, key, value, rule).transpose(1, 2)

    def places(self, tokens: Sequence[tuple[Pages, NDArray[np.int64]]]) -> Places:
        """Return where tokens are in a layer's pages, by sequences' pages and their positions."""
        page_U = np.concatenate([pages[at // self.page_tokens] for pages, at in tokens])
        offset_U = np.concatenate([at % self.page_tokens for _, at in tokens])
        return to_device(page_U, self.device), slice(None), to_device(offset_U, self.device)

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


def prefill(policy: Any, cache: PagedCache, chunks: Sequence[Chunk]) -> Tensor:
    """Write chunks of sequences to their pages; return logits `[N, V]` after each last token."""
    layout = ChunkLayout(cache, chunks)
    return run_policy(policy, layout.input_ids, layout, layout.last_N)[0]


def fill_pages(policy: Any, cache: PagedCache, chunks: Sequence[Chunk]) -> None:
    """As `prefill`, without the logits, and so without most of the last layer."""
    layout = ChunkLayout(cache, chunks, needs_logits=False)
    with suppress(_PagesAreFilled):
        run_policy(policy, layout.input_ids, layout, layout.last_N)


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
        self._layers = cache.layers
        self._ends_after = None if needs_logits else max(cache.layers)
        tensor = partial(to_device, device=cache.device)
        positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
        ends = np.cumsum([len(at) for at in positions])
        rows = [np.arange(end - len(at), end) for at, end in zip(positions, ends, strict=True)]
        self.input_ids = tensor(np.concatenate([chunk.tokens for chunk in chunks])[None])
        self.position_ids = tensor(np.concatenate(positions)[None])
        self.last_N = tensor(ends - 1)
        holders = [(of, i) for i, each in enumerate(chunks) for of in (each.pages, *each.copies)]
        self._written_U = cache.places([(pages, positions[i]) for pages, i in holders])
        from_U = np.concatenate([rows[i] for _, i in holders])
        self._from_U = tensor(from_U) if len(holders) > len(chunks) else slice(None)
        self._segments: Segments | None = None
        if segments.has_fused_kernels(cache.device):
            lengths = [len(at) for at in positions], [chunk.end for chunk in chunks]
            self._segments = Segments(*lengths, cache.device)
            self._seen_K = cache.places([(chunk.pages, np.arange(chunk.end)) for chunk in chunks])
        else:
            self._batches = [
                _ChunkBatch([chunks[i] for i in batch], [rows[i] for i in batch], cache)
                for batch in _batches(chunks)
            ]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        pair = self._layers[layer]
        for cached, new in zip(pair, (key, value), strict=True):
            cached[self._written_U] = new[0].transpose(0, 1)[self._from_U]
        if layer == self._ends_after:
            raise _PagesAreFilled
        packed_THD = query[0].transpose(0, 1)
        if self._segments is not None:
            keys, values = (pages[self._seen_K] for pages in pair)
            return self._segments.attend(packed_THD, keys, values, rule)[None]
        attended_THD = value.new_empty((*packed_THD.shape[:2], value.shape[-1]))
        for batch in self._batches:
            batch.attend(packed_THD, pair, rule, into_THD=attended_THD)
        return attended_THD[None]


class _ChunkBatch:
    """Chunks of similar length, padded to each other."""

    def __init__(
        self, chunks: Sequence[Chunk], rows: Sequence[NDArray[np.int64]], cache: PagedCache
    ) -> None:
        """`rows` has the places of each chunk's tokens among those of all batches."""
        held = [-(-chunk.end // cache.page_tokens) for chunk in chunks]
        pages_NW = np.zeros((len(chunks), max(held)), np.int64)
        for row_W, chunk, num_pages in zip(pages_NW, chunks, held, strict=True):
            row_W[:num_pages] = chunk.pages[:num_pages]
        lengths_N1 = np.array([[len(each)] for each in rows])
        steps_Q = np.arange(lengths_N1.max())
        gather_NQ = np.array([[each[0]] for each in rows]) + np.minimum(steps_Q, lengths_N1 - 1)
        positions_NQ = np.array([[chunk.start] for chunk in chunks]) + steps_Q
        real = np.flatnonzero(steps_Q < lengths_N1)
        arrays = pages_NW, gather_NQ, positions_NQ, real
        self._pages_NW, self._gather_NQ, self._positions_NQ, self._real = (
            to_device(array, cache.device) for array in arrays
        )

    def attend(
        self, packed_THD: Tensor, cached: Sequence[Tensor], rule: AttentionRule, *, into_THD: Tensor
    ) -> None:
        keys, values = (self._unpaged(pages) for pages in cached)
        gather = self._gather_NQ.flatten()
        rows = packed_THD.index_select(0, gather)
        rows = rows.view(*self._gather_NQ.shape, *rows.shape[1:]).transpose(1, 2)
        attended = attend_where_visible(rows, keys, values, self._positions_NQ, rule)
        real = attended.transpose(1, 2).flatten(0, 1).index_select(0, self._real)
        into_THD.index_copy_(0, gather[self._real], real)

    def _unpaged(self, pages: Tensor) -> Tensor:
        gathered = pages.index_select(0, self._pages_NW.flatten())
        by_chunk = gathered.view(*self._pages_NW.shape, *gathered.shape[1:])
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
