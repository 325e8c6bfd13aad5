"""Which source a submission's prompt comes from, in a run of several: a share of every block.

Source and place follow from the submission's index and the run's seed alone, so that resume, replay
and audit need no state. A block of `BLOCK` submissions has of each source its share, rounded up or
down, in an order of its own; a cycle of blocks has the share itself. So a source of a thousandth is
in one of ten blocks.

Letters: B blocks of a cycle, P places in a block, S sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

BLOCK = 100
CYCLE = 100_000
_STRIDE = 617
"""From block to block of a cycle of 1,000, by the golden ratio: rare sources are far apart."""
_OF_BLOCKS = 0x6D6978
"""Apart from the seeds of the sources' own orders."""


def quotas(weights: Mapping[str, float]) -> dict[str, int]:
    """Return how many of a cycle each source has: its share, to the nearest one, at least one.

    What rounding down leaves goes to the largest remainders, the first source first.
    """
    total = sum(weights.values())
    exact = {name: CYCLE * weight / total for name, weight in weights.items()}
    found = {name: max(1, int(share)) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: found[name] - exact[name])
    for name in by_remainder[: max(0, CYCLE - sum(found.values()))]:
        found[name] += 1
    while sum(found.values()) > CYCLE:  # small ones were raised to one
        found[max(found, key=lambda name: found[name])] -= 1
    return found


class Mixture:
    """Draws from several sources, which are numbered as their quotas come."""

    def __init__(self, quotas: Mapping[str, int], *, seed: int) -> None:
        self._quotas = np.array([*quotas.values()])
        self._seed = seed
        # The cycle's places, sorted by source, are dealt to the blocks in turns.
        num_blocks = int(self._quotas.sum()) // BLOCK
        sources_PB = np.repeat(np.arange(len(quotas)), self._quotas).reshape(BLOCK, num_blocks)
        self._sources_BP = sources_PB.T[np.arange(num_blocks) * _STRIDE % num_blocks]
        counts_BS = np.array([np.bincount(p, minlength=len(quotas)) for p in self._sources_BP])
        self._num_before_BS = np.cumsum(counts_BS, axis=0) - counts_BS
        self._order = lru_cache(maxsize=2)(self._make_order)

    def draw(self, submission_index: int) -> tuple[int, int]:
        """Return which source a submission draws from, and how many it drew before."""
        block, place = divmod(submission_index, BLOCK)
        cycle, block_of_cycle = divmod(block, len(self._sources_BP))
        order_P = self._order(block)
        source = int(order_P[place])
        num_before = cycle * self._quotas[source] + self._num_before_BS[block_of_cycle, source]
        return source, int(num_before + (order_P[:place] == source).sum())

    def _make_order(self, block: int) -> np.ndarray:
        sources_P = self._sources_BP[block % len(self._sources_BP)]
        return np.random.default_rng([self._seed, block, _OF_BLOCKS]).permutation(sources_P)
