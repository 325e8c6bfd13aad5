"""How long prompts and completions are: of a run's log, or assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

NUM_DRAWN = 1 << 14
SIGMA = 1.0
MEAN_OF_LONGEST = 0.3355
"""9,276 of 27,648 tokens: in the paper's two rows of 1.5B hours times throughput, over 250 steps of
8,192 trajectories, are 9,275 and 9,276 tokens (arXiv 2505.24298 v5, Table 1 and Figure 5c)."""


@dataclass(frozen=True)
class Lengths:
    prompt_tokens: float
    """In the mean."""
    completion_tokens: NDArray[np.int64]
    """`[draws]`: completions, any of which is as likely."""
    source: str

    def of_seed(self, seed: int) -> int:
        return int(self.completion_tokens[seed % len(self.completion_tokens)])

    @cached_property
    def mean(self) -> float:
        return float(self.completion_tokens.mean())

    @cached_property
    def mean_of_squares(self) -> float:
        """Of prompt and completion together."""
        return float(((self.completion_tokens + self.prompt_tokens) ** 2.0).mean())

    @cached_property
    def decoding_tokens(self) -> float:
        """Return the tokens in the cache of a row, in the mean of the steps that decode it."""
        squares = float((self.completion_tokens**2.0).mean())
        return self.prompt_tokens + squares / self.mean / 2

    def mean_longest_of(self, number: int) -> float:
        """Return the mean of the longest of so many."""
        places = np.linspace(0.0, 1.0, len(self.completion_tokens) + 1) ** number
        return float(np.diff(places) @ np.sort(self.completion_tokens))

    def longest_of(self, number: int) -> float:
        """Return what the longest of so many completions likely has."""
        return float(np.quantile(self.completion_tokens, 1 - 0.5 / number))


def recorded_lengths(
    prompt_tokens: Sequence[int], completion_tokens: Sequence[int], *, source: str
) -> Lengths:
    mean = float(np.mean(prompt_tokens))
    return Lengths(mean, np.asarray(completion_tokens, np.int64), source)


def assumed_lengths(
    longest: int, *, mean: float = 0.0, sigma: float = SIGMA, prompt_tokens: float = 128.0
) -> Lengths:
    """Return lognormal lengths that are cut at the longest.

    Args:
        longest: `generation.max_new_tokens`.
        mean: of the completions after the cut; by default a share of the longest, as in the paper.
    """
    mean = mean or MEAN_OF_LONGEST * longest
    places = (np.arange(NUM_DRAWN) + 0.5) / NUM_DRAWN
    shape = np.exp(sigma * _normal_quantiles(places))
    low, high = 0.0, float(longest) * 10
    for _ in range(60):
        median = (low + high) / 2
        too_long = np.minimum(median * shape, longest).mean() > mean
        low, high = (low, median) if too_long else (median, high)
    drawn = np.clip(low * shape, 1, longest).round().astype(np.int64)
    said = f"assumed: lognormal, {mean:,.0f} tokens in the mean, cut at {longest:,}"
    return Lengths(prompt_tokens, np.random.default_rng(0).permutation(drawn), said)


def _normal_quantiles(places: NDArray[np.float64]) -> NDArray[np.float64]:
    from statistics import NormalDist

    found: NDArray[np.float64] = np.vectorize(NormalDist().inv_cdf)(places)
    return found
