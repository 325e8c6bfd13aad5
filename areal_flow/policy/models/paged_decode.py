"""Decoding: one new token a row, against the row's own pages.

Scores are computed page by page, where the pages are: a row costs what its own length costs, and
pages that several rows share are read once for all of them.

Letters: P pages, S rows that decode, M rows that share a page, R pairs of a row with one of its
pages, W pages of the longest row, H heads, K key-value heads, G heads to each of those, D head
dimension, C columns.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

from areal_flow.policy.models.attention import AttentionRule, to_device
from areal_flow.policy.models.paged_prefill import PagedCache, Pages
from areal_flow.policy.models.policy import run_policy

_MIN_FILL = 0.5
"""Below this share of pages in use, those in use are copied together before they are multiplied."""


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
        """Find what each row of pages reads.

        With `share_pages` pages are read where they are, once for all rows that share them.
        Without, a row's sums do not depend on which other rows there are.
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
            self._parts, place_R = _shared_products(pages_R, rows_R, ends_R, cache.device)
        else:
            self._parts = [_Part(pages_R, rows_R[:, None], ends_R[:, None], cache.device)]
            place_R = np.arange(len(pages_R))
        places_SW = np.full(held_SW.shape, sum(part.num_places for part in self._parts))
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
        scores = [part.scores(query_SKGD, keys, rule) for part in self._parts]
        largest_SH = self._largest(scores)
        if rule.sinks is not None:
            largest_SH = torch.maximum(largest_SH, rule.sinks.float())
        sums = [
            part.sums(each, largest_SH, values)
            for part, each in zip(self._parts, scores, strict=True)
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
            part.by_place(each.amax(dim=-1, keepdim=True))
            for part, each in zip(self._parts, scores, strict=True)
        ]
        nothing_1H = largest[0].new_full((1, largest[0].shape[1]), float("-inf"))
        return torch.cat((*largest, nothing_1H))[self._places_SW].amax(dim=1)


def _shared_products(
    pages_R: Pages, rows_R: NDArray[np.int64], ends_R: NDArray[np.int64], device: torch.device
) -> tuple[list[_Part], NDArray[np.int64]]:
    """Return what reads each page once, and each pair's place in the results."""
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
        parts.append(_Part(pages, rows_P[:, None], ends_P[:, None], device))
    if len(alone) < len(pages_R):
        shared = np.flatnonzero(~alone_R)
        shared = shared[np.argsort(pages_R[shared], kind="stable")]
        pages, first, holders = np.unique(pages_R[shared], return_index=True, return_counts=True)
        page = np.repeat(np.arange(len(pages)), holders)
        member = np.arange(len(shared)) - first[page]
        rows_PM, ends_PM = np.zeros((2, len(pages), int(holders.max())), np.int64)
        rows_PM[page, member], ends_PM[page, member] = rows_R[shared], ends_R[shared]
        place_R[shared] = size + page * rows_PM.shape[1] + member
        parts.append(_Part(pages, rows_PM, ends_PM, device))
    return parts, place_R


class _Part:
    """Pages that are read in one product, each with as many rows as hold it, padded to M."""

    def __init__(
        self,
        pages_P: Pages | None,
        rows_PM: NDArray[np.int64],
        ends_PM: NDArray[np.int64],
        device: torch.device,
    ) -> None:
        """`ends_PM` is how many tokens of a page its row has; 0 or less for padding.

        Without `pages_P`, all pages from the first one on are read.
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
        """Return `[P, K, M * G, D]`: what each page's rows bring."""
        brought = rows_SKGD.index_select(0, self._rows_R)
        by_member = torch.unflatten(brought, 0, (self._num_pages, self._num_members))
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
