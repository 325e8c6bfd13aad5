"""How long prompts and completions are: of a run's log, or assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_DRAWN = 1 << 14
SIGMA = 1.0
MEAN_OF_LONGEST = 0.3355
"""9,276 of 27,648 tokens: in the paper's two rows of 1.5B hours times throughput, over 250 steps of
8,192 trajectories, are 9,275 and 9,276 tokens (arXiv 2505.24298 v5, Table 1 and Figure 5c)."""
GROUP_SHARE = 0.64
"""The square of 0.8: a linear probe of the question predicts how long reasoning will be with a
correlation above 0.8 (arXiv 2506.08390), so at least this share of variance is the prompt's."""


@dataclass(frozen=True)
class Lengths:
    prompt_tokens: float
    """In the mean."""
    completion_tokens: NDArray[np.int64]
    """`[draws]`: completions, any of which is as likely."""
    source: str
    group_share: float = 0.0
    """Of the variance of lengths, as normal scores: what completions of one prompt have in common.
    """

    def of_group(self, seeds: Sequence[int]) -> list[int]:
        """Return the lengths of the completions of one prompt, by their seeds."""
        own, common = np.asarray(seeds) % NUM_DRAWN, sum(seeds) // NUM_DRAWN % NUM_DRAWN
        return [*map(int, self._of_scores(_normal_scores()[own], _normal_scores()[common]))]

    def _of_scores(self, own: NDArray[np.float64], common: Any) -> NDArray[np.int64]:
        scores = sqrt(self.group_share) * common + sqrt(1 - self.group_share) * own
        places = np.searchsorted(_normal_scores(), scores).clip(max=NUM_DRAWN - 1)
        lengths: NDArray[np.int64] = self._sorted[places * len(self._sorted) // NUM_DRAWN]
        return lengths

    @cached_property
    def _sorted(self) -> NDArray[np.int64]:
        return np.sort(self.completion_tokens)

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

    def mean_longest_of(self, group_size: int) -> float:
        """Return the mean of the longest completion of a group."""
        scores = np.random.default_rng(0).standard_normal((1024, group_size + 1))
        return float(self._of_scores(scores[:, 1:], scores[:, :1]).max(axis=1).mean())

    def longest_of(self, number: int) -> float:
        """Return what the longest of so many completions likely has."""
        return float(np.quantile(self.completion_tokens, 1 - 0.5 / number))


def recorded_lengths(
    prompt_tokens: Sequence[int],
    completion_tokens: Sequence[int],
    *,
    source: str,
    groups: Sequence[int] = (),
) -> Lengths:
    """Return lengths that were found, of which equal `groups` are of one prompt."""
    lengths = np.asarray(completion_tokens, np.int64)
    share = _group_share(lengths, groups) if len(groups) else 0.0
    return Lengths(float(np.mean(prompt_tokens)), lengths, source, share)


def _group_share(lengths: NDArray[np.int64], groups: Sequence[int]) -> float:
    """Return the share of variance between groups, less what equally many would have by chance."""
    logs = np.log(lengths + 1.0)
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    between = (np.bincount(group, logs - logs.mean()) ** 2 / sizes).sum() / len(logs)
    by_chance = len(sizes) / len(logs)
    if by_chance == 1 or not logs.var():
        return 0.0
    return float(np.clip((between / logs.var() - by_chance) / (1 - by_chance), 0.0, 1.0))


def assumed_lengths(
    longest: int,
    *,
    mean: float = 0.0,
    sigma: float = SIGMA,
    prompt_tokens: float = 128.0,
    group_share: float = GROUP_SHARE,
) -> Lengths:
    """Return lognormal lengths that are cut at the longest.

    Args:
        longest: `generation.max_new_tokens`.
        mean: of the completions after the cut; by default a share of the longest, as in the paper.
    """
    mean = mean or MEAN_OF_LONGEST * longest
    shape = np.exp(sigma * _normal_scores())
    low, high = 0.0, float(longest) * 10
    for _ in range(60):
        median = (low + high) / 2
        too_long = np.minimum(median * shape, longest).mean() > mean
        low, high = (low, median) if too_long else (median, high)
    drawn = np.clip(low * shape, 1, longest).round().astype(np.int64)
    source = f"assumed: lognormal, {mean:,.0f} tokens in the mean, cut at {longest:,}"
    return Lengths(prompt_tokens, drawn, source, group_share)


@cache
def _normal_scores() -> NDArray[np.float64]:
    """Return equally likely draws of the standard normal distribution, in order."""
    draw = NormalDist().inv_cdf
    return np.array([draw((place + 0.5) / NUM_DRAWN) for place in range(NUM_DRAWN)])
