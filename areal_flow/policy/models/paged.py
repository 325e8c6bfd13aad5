"""Keys and values in pages of a fixed memory: prefill of chunks, and decoding of one token a row.

A sequence's pages lie anywhere, and sequences may share some. Which sequence holds which page is
decided in `areal_flow.rollout.engines.pages`.

Decoding computes scores page by page, where the pages are: a row costs what its own length costs,
and pages that several rows share are read once for all of them.

Letters of prefill: N chunks, T packed tokens, U places that they are written to, Q padded chunk
length, L padded length. Of decoding: S rows, M rows that share a page, R pairs of a row with one of
its pages, G heads to each key-value head, C columns. Of both: P pages, W pages of the longest
sequence, H heads, K key-value heads, D head dimension.
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
from torch.nn.functional import embedding_bag

from areal_flow.policy.models import segments
from areal_flow.policy.models.attention import (
    AttentionRule,
    attend_causally,
    attend_where_visible,
    to_device,
)
from areal_flow.policy.models.policy import run_policy
from areal_flow.policy.models.segments import Segments

MAX_SCORES = 1 << 22
"""Scores of one head that a padded batch of chunks may have, so that its mask stays small."""

_MIN_FILL = 0.5
"""If fewer pages are in use, decoding copies them together before it multiplies them."""

_SHORT = 32
"""Up to this length in tokens, sequences are always padded to each other."""

Pages = NDArray[np.int64]

Places = tuple[Tensor, slice, Tensor]
"""The page of each token, all heads, and its place in the page: an index of a layer's pages."""


def page_tokens_for(max_model_len: int) -> int:
    """Return the size of a page: larger ones waste more memory, smaller ones multiply slower.

    On one core, with 16 to 64 dimensions a head, 32 is faster for contexts of one or two pages.
    """
    return 32 if max_model_len <= 256 else 64


class PagedCache:
    """Keys and values of `P` pages, allocated once: `[P, K, page_tokens, D]` by layer."""

    def __init__(self, policy: Any, *, num_pages: int, page_tokens: int) -> None:
        """Run a policy over one token, to learn the shapes of its layers."""
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
        """Return the index of tokens in a layer's pages, of sequences' pages and positions."""
        page_U = np.concatenate([pages[at // self.page_tokens] for pages, at in tokens])
        offset_U = np.concatenate([at % self.page_tokens for _, at in tokens])
        return to_device(page_U, self.device), slice(None), to_device(offset_U, self.device)

    def copy_page(self, source: int, targets: list[int], num_tokens: int) -> None:
        for pair in self.layers.values():
            for pages in pair:
                pages[targets, :, :num_tokens] = pages[source, :, :num_tokens]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence that follow those in its pages."""

    tokens: NDArray[np.int64]
    start: int
    """Position of the first one."""
    pages: Pages
    """All pages of the sequence in its order, with room for these tokens."""
    copies: Sequence[Pages] = ()
    """Pages of other sequences with the same tokens, which get the same keys and values."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def prefill(policy: Any, cache: PagedCache, chunks: Sequence[Chunk]) -> Tensor:
    """Write chunks of sequences to their pages; return logits `[N, V]` after each last token."""
    layout = ChunkLayout(cache, chunks)
    return run_policy(policy, layout.input_ids, layout, layout.last_N)[0]


def fill_pages(policy: Any, cache: PagedCache, chunks: Sequence[Chunk]) -> None:
    """Write chunks as `prefill` does, without logits and most of the last layer."""
    layout = ChunkLayout(cache, chunks, needs_logits=False)
    with suppress(_PagesAreFilled):
        run_policy(policy, layout.input_ids, layout, layout.last_N)


class _PagesAreFilled(Exception):
    """Ends a pass after its last keys and values."""


class ChunkLayout:
    """Chunks packed into one row `[1, T]`, each against its own sequence's pages.

    All new keys and values are written before any are read, so that a chunk sees what another chunk
    of the same pass writes to a shared page.
    """

    def __init__(
        self, cache: PagedCache, chunks: Sequence[Chunk], *, needs_logits: bool = True
    ) -> None:
        """Without `needs_logits` a pass raises `_PagesAreFilled` after the last values."""
        self._layers = cache.layers
        self._ends_after = None if needs_logits else max(cache.layers)
        tensor = partial(to_device, device=cache.device)
        positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
        ends = np.cumsum([len(at) for at in positions])
        rows = [np.arange(end - len(at), end) for at, end in zip(positions, ends, strict=True)]
        self.input_ids = tensor(np.concatenate([chunk.tokens for chunk in chunks])[None])
        self.position_ids = tensor(np.concatenate(positions)[None])
        self.last_N = tensor(ends - 1)
        holders = [
            (pages, i) for i, chunk in enumerate(chunks) for pages in (chunk.pages, *chunk.copies)
        ]
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
        """`rows` has the places of each chunk's tokens in the packed row."""
        counts = [-(-chunk.end // cache.page_tokens) for chunk in chunks]
        pages_NW = np.zeros((len(chunks), max(counts)), np.int64)
        for row_W, chunk, num_pages in zip(pages_NW, chunks, counts, strict=True):
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
    """Return indices of chunks that are padded to each other, by at most half their length."""
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


def decode(
    policy: Any,
    cache: PagedCache,
    tokens_S: NDArray[np.int64],
    positions_S: NDArray[np.int64],
    tables_SW: Pages,
    *,
    share_pages: bool = True,
) -> Tensor:
    """Write one token to every row's pages and return the logits `[S, V]` after it."""
    layout = PagedDecodeLayout(cache, tables_SW, positions_S, share_pages=share_pages)
    return run_policy(policy, to_device(tokens_S[:, None], cache.device), layout, 1)[:, 0]


class PagedDecodeLayout:
    """One new token a row, written to the row's last page, against all of the row's pages."""

    def __init__(
        self,
        cache: PagedCache,
        tables_SW: Pages,
        positions_S: NDArray[np.int64],
        *,
        share_pages: bool,
    ) -> None:
        """Plan which pages are read together.

        With `share_pages` pages are read in place, once for all rows that share them. Without it a
        row's sums do not depend on the other rows.
        """
        self._layers = cache.layers
        tensor = partial(to_device, device=cache.device)
        self.position_ids = tensor(positions_S[:, None])
        last_S = positions_S // cache.page_tokens
        page_S = tables_SW[np.arange(len(last_S)), last_S]
        offset_S = positions_S % cache.page_tokens
        self._written_S = (tensor(page_S), slice(None), tensor(offset_S))
        held_SW = np.arange(last_S.max() + 1) <= last_S[:, None]
        rows_R, ordinals_R = held_SW.nonzero()
        pages_R = tables_SW[:, : held_SW.shape[1]][held_SW]
        ends_R = positions_S[rows_R] + 1 - ordinals_R * cache.page_tokens
        if share_pages:
            self._products, place_R = _shared_products(pages_R, rows_R, ends_R, cache.device)
        else:
            self._products = [_PageProduct(pages_R, rows_R[:, None], ends_R[:, None], cache.device)]
            place_R = np.arange(len(pages_R))
        places_SW = np.full(held_SW.shape, sum(product.num_places for product in self._products))
        places_SW[held_SW] = place_R
        self._places_SW, self._place_R = tensor(places_SW), tensor(place_R)
        self._first_S = tensor(np.concatenate(([0], np.cumsum(last_S + 1)[:-1])))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        keys, values = self._layers[layer]
        keys[self._written_S], values[self._written_S] = key[:, :, 0], value[:, :, 0]
        num_rows, num_heads = query.shape[:2]
        query_SKGD = query.view(num_rows, key.shape[1], -1, query.shape[-1])
        scores = [product.scores(query_SKGD, keys, rule) for product in self._products]
        largest_SH = self._largest(scores)
        if rule.sinks is not None:
            largest_SH = torch.maximum(largest_SH, rule.sinks.float())
        sums = [
            product.sums(each, largest_SH, values)
            for product, each in zip(self._products, scores, strict=True)
        ]
        sums_RC = sums[0] if len(sums) == 1 else torch.cat(sums)
        sums_SC = embedding_bag(self._place_R, sums_RC, self._first_S, mode="sum")
        totals_SH = sums_SC[:, :num_heads]
        if rule.sinks is not None:
            totals_SH = totals_SH + (rule.sinks.float() - largest_SH).exp()
        weighted = sums_SC[:, num_heads:].view(num_rows, 1, num_heads, -1)
        return (weighted / totals_SH[:, None, :, None]).to(query.dtype)

    def _largest(self, scores: list[Tensor]) -> Tensor:
        largest = [
            product.by_place(each.amax(dim=-1, keepdim=True))
            for product, each in zip(self._products, scores, strict=True)
        ]
        padding_1H = largest[0].new_full((1, largest[0].shape[1]), float("-inf"))
        return torch.cat((*largest, padding_1H))[self._places_SW].amax(dim=1)


def _shared_products(
    pages_R: Pages, rows_R: NDArray[np.int64], ends_R: NDArray[np.int64], device: torch.device
) -> tuple[list[_PageProduct], NDArray[np.int64]]:
    """Return products that read each page once, and each pair's place in their results."""
    num_pages = int(pages_R.max()) + 1
    holders_P = np.bincount(pages_R, minlength=num_pages)
    alone_R = holders_P[pages_R] == 1
    alone, place_R = np.flatnonzero(alone_R), np.empty(len(pages_R), np.int64)
    products = []
    if len(alone) >= _MIN_FILL * num_pages:
        pages, place_R[alone], size = None, pages_R[alone], num_pages
    else:
        pages, place_R[alone], size = pages_R[alone], np.arange(len(alone)), len(alone)
    if size:
        rows_P, ends_P = np.zeros((2, size), np.int64)
        rows_P[place_R[alone]], ends_P[place_R[alone]] = rows_R[alone], ends_R[alone]
        products.append(_PageProduct(pages, rows_P[:, None], ends_P[:, None], device))
    if len(alone) < len(pages_R):
        shared = np.flatnonzero(~alone_R)
        shared = shared[np.argsort(pages_R[shared], kind="stable")]
        pages, first, holders = np.unique(pages_R[shared], return_index=True, return_counts=True)
        page = np.repeat(np.arange(len(pages)), holders)
        member = np.arange(len(shared)) - first[page]
        rows_PM, ends_PM = np.zeros((2, len(pages), int(holders.max())), np.int64)
        rows_PM[page, member], ends_PM[page, member] = rows_R[shared], ends_R[shared]
        place_R[shared] = size + page * rows_PM.shape[1] + member
        products.append(_PageProduct(pages, rows_PM, ends_PM, device))
    return products, place_R


class _PageProduct:
    """Pages that are read in one product, each with the rows that hold it, padded to M."""

    def __init__(
        self,
        pages_P: Pages | None,
        rows_PM: NDArray[np.int64],
        ends_PM: NDArray[np.int64],
        device: torch.device,
    ) -> None:
        """`ends_PM` is the number of tokens that a row has in a page; 0 or less for padding.

        Without `pages_P`, all pages from the first on are read.
        """
        self._device = device
        self.num_places = rows_PM.size
        self._num_pages, self._num_members = rows_PM.shape
        self._pages = slice(self._num_pages) if pages_P is None else to_device(pages_P, device)
        self._rows_R = to_device(rows_PM.flatten(), device)
        self._ends_PM = ends_PM
        self._hidden: dict[int | None, Tensor] = {}

    def scores(self, query_SKGD: Tensor, keys: Tensor, rule: AttentionRule) -> Tensor:
        """Return float32 scores `[P, K, M * G, page_tokens]`, those of hidden keys -inf."""
        scores = (self._by_page(query_SKGD) @ keys[self._pages].transpose(2, 3)).float()
        scale = rule.scale
        if rule.softcap is not None:
            scores, scale = torch.tanh(scores * (scale / rule.softcap)), rule.softcap
        by_member = torch.unflatten(scores, 2, (self._num_members, -1))
        hidden = self._hide(rule.window, scores.shape[-1])
        return torch.add(hidden, by_member, alpha=scale).flatten(2, 3)

    def sums(self, scores: Tensor, largest_SH: Tensor, values: Tensor) -> Tensor:
        """Return, for each place, sums of weights and of weighted values `[R, H + H * D]`."""
        largest = self._by_page(largest_SH.view(len(largest_SH), scores.shape[1], -1, 1))
        weights = scores.sub_(largest).exp_()
        weighted = (weights.to(values.dtype) @ values[self._pages]).float()
        sums = weights.sum(dim=-1, keepdim=True)
        return torch.cat([self.by_place(sums), self.by_place(weighted)], dim=1)

    def _by_page(self, rows_SKGD: Tensor) -> Tensor:
        """Return `[P, K, M * G, D]`, by the rows of each page."""
        rows = rows_SKGD.index_select(0, self._rows_R)
        by_member = torch.unflatten(rows, 0, (self._num_pages, self._num_members))
        return by_member.transpose(1, 2).flatten(2, 3)

    def by_place(self, values: Tensor) -> Tensor:
        """Return `[R, H * D]` of `[P, K, M * G, D]`."""
        by_member = torch.unflatten(values, 2, (self._num_members, -1))
        return by_member.transpose(1, 2).flatten(0, 1).flatten(1)

    def _hide(self, window: int | None, page_tokens: int) -> Tensor:
        """Return `[P, 1, M, 1, page_tokens]`: 0 where a row sees a page's token, else -inf."""
        if window not in self._hidden:
            steps, ends_PM1 = np.arange(page_tokens), self._ends_PM[:, :, None]
            hidden = steps >= ends_PM1
            if window is not None:
                hidden |= steps < ends_PM1 - window
            bias = np.where(hidden, np.float32("-inf"), np.float32(0))
            self._hidden[window] = to_device(bias[:, None, :, None, :], self._device)
        return self._hidden[window]
