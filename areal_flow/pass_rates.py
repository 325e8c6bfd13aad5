"""Reward and pass are two things: what a completion is worth, and whether that is enough.

The one rule of what passes stands here, and in SQL in `store/sql/passing.sql`; a test holds both
equal. So do the two means of an evaluation with their 95% intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from math import sqrt
from operator import itemgetter
from statistics import fmean, stdev
from typing import Any

from areal_flow.types import EvaluationScores, EvaluationTable, PassRate, RewardMean

PASS_THRESHOLD = 0.5
"""Halfway between wrong and right of a verifier that gives 0 and 1."""
PASS_RATE = "rollout/pass_rate"
"""The pass rate of a step's trajectories, in the ledger's `metrics` and in sinks."""
Z_95 = 1.959963984540054


def passes(reward: float | None, *, threshold: float) -> bool:
    """Return whether a completion passes: its reward is above the threshold; none never is."""
    return reward is not None and reward > threshold


def tabulate(rows: Sequence[Mapping[str, Any]], *, threshold: float) -> EvaluationTable:
    """Return what the rows of one evaluation were worth, overall and by difficulty."""
    difficulty = itemgetter("difficulty")
    by_difficulty = groupby(sorted(rows, key=difficulty), difficulty)
    return EvaluationTable(
        evaluation_scores(rows, threshold=threshold),
        {value: evaluation_scores([*part], threshold=threshold) for value, part in by_difficulty},
    )


def evaluation_scores(rows: Sequence[Mapping[str, Any]], *, threshold: float) -> EvaluationScores:
    """Return pass rate, mean reward and mean length of some answers.

    An answer without a reward has not passed, and is no part of the mean reward.

    Args:
        rows: `reward` and `num_output_tokens` of each answer.
    """
    rewards = [row["reward"] for row in rows]
    num_passed = sum(passes(reward, threshold=threshold) for reward in rewards)
    return EvaluationScores(
        wilson_interval(num_passed, len(rows)),
        normal_interval([reward for reward in rewards if reward is not None]),
        sum(row["num_output_tokens"] for row in rows) / max(1, len(rows)),
    )


def wilson_interval(num_passed: int, n: int) -> PassRate:
    """Return the pass rate with Wilson's 95% score interval (Wilson 1927); all 0 when n is 0."""
    if n == 0:
        return PassRate(0.0, 0.0, 0.0, 0)
    rate = num_passed / n
    spread = 1 + Z_95**2 / n
    center = (rate + Z_95**2 / (2 * n)) / spread
    half = Z_95 / spread * sqrt(rate * (1 - rate) / n + Z_95**2 / (4 * n**2))
    return PassRate(rate, max(0.0, center - half), min(1.0, center + half), n)


def normal_interval(rewards: Sequence[float]) -> RewardMean:
    """Return the mean with its 95% normal interval, mean ± 1.96 s / √n; no width below two.

    s is the sample's standard deviation (unbiased variance).
    """
    if not rewards:
        return RewardMean(0.0, 0.0, 0.0, 0)
    mean, n = fmean(rewards), len(rewards)
    half = Z_95 * stdev(rewards) / sqrt(n) if n > 1 else 0.0
    return RewardMean(mean, mean - half, mean + half, n)
