"""Which source a submission's prompt comes from, in a run of several: a fixed share of every block.

Source and place follow from the submission's index and the run's seed alone, so that resume, replay
and audit need no state. A block of `BLOCK` submissions has the same number of each source, in an
order of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

BLOCK = 100
_OF_BLOCKS = 0x6D6978
"""Apart from the seeds of the sources' own orders."""


def quotas(weights: Mapping[str, float]) -> dict[str, int]:
    """Return how many of a block each source has: its share, to the nearest percent, at least one.

    What rounding down leaves goes to the largest remainders, the first source first.
    """
    total = sum(weights.values())
    exact = {name: BLOCK * weight / total for name, weight in weights.items()}
    found = {name: max(1, int(share)) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: found[name] - exact[name])
    for name in by_remainder[: max(0, BLOCK - sum(found.values()))]:
        found[name] += 1
    while sum(found.values()) > BLOCK:  # small ones were raised to one
        found[max(found, key=lambda name: found[name])] -= 1
    return found


class Mixture:
    """Draws from several sources, which are numbered as their quotas come."""

    def __init__(self, quotas: Mapping[str, int], *, seed: int) -> None:
        """Take the quotas of a block, whose sum is the block."""
        self._quotas = [*quotas.values()]
        self._seed = seed
        self._order = lru_cache(maxsize=2)(self._make_order)

    def draw(self, submission_index: int) -> tuple[int, int]:
        """Return which source a submission draws from, and how many it drew before."""
        block, place = divmod(submission_index, sum(self._quotas))
        order = self._order(block)
        source = int(order[place])
        return source, block * self._quotas[source] + int((order[:place] == source).sum())

    def _make_order(self, block: int) -> np.ndarray:
        sources = np.repeat(np.arange(len(self._quotas)), self._quotas)
        return np.random.default_rng([self._seed, block, _OF_BLOCKS]).permutation(sources)
