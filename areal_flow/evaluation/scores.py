"""What an evaluation measured: rates and means with their intervals, overall and in parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PassRate:
    """A rate with its 95% interval: Wilson's, or normal where prompts have several samples."""

    pass_rate: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class RewardMean:
    """A mean reward with its 95% normal interval; `n` prompts had a reward."""

    reward_mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class EvaluationScores:
    """What some held-out answers were worth, and how long they were."""

    passed: PassRate
    reward: RewardMean
    mean_tokens: float
    num_samples: int = 1
    """Of each prompt; the most, where they differ."""
    pass_at: Mapping[int, float] = field(default_factory=dict)
    """pass@k by k, of several samples: how likely one of k passes."""
    best_of: float | None = None
    """The mean reward of each prompt's best sample, of several."""
    majority: float | None = None
    """The pass rate of the answer that most samples agree on, where a verifier says what it is."""
    fewest_samples: int = 1
    """Of a prompt: fewer than `num_samples` where held-out sets differ in them."""

    def by_name(self) -> dict[str, float]:
        """Return rates, means and bounds by the names that reports, sinks and files show."""
        of_all = {"best_of": self.best_of, "majority_of": self.majority}
        return {
            **{f"pass_at_{k}": rate for k, rate in self.pass_at.items()},
            **{f"{name}_{self.num_samples}": x for name, x in of_all.items() if x is not None},
            "pass_rate": self.passed.pass_rate,
            "pass_rate_low": self.passed.low,
            "pass_rate_high": self.passed.high,
            "reward_mean": self.reward.reward_mean,
            "reward_mean_low": self.reward.low,
            "reward_mean_high": self.reward.high,
        }

    def as_json(self) -> dict[str, float]:
        """Return `by_name`, the numbers of prompts and of their samples, and the mean length."""
        counts = {"n": self.passed.n, "num_samples": self.num_samples}
        return {**self.by_name(), **counts, "mean_tokens": self.mean_tokens}


@dataclass(frozen=True, slots=True)
class EvaluationTable:
    """A held-out evaluation: what its answers were worth, over all prompts and in parts."""

    overall: EvaluationScores
    """Of the prompts of all sets, each of which counts once."""
    by_difficulty: Mapping[int, EvaluationScores] = field(default_factory=dict)
    by_set: Mapping[str, EvaluationScores] = field(default_factory=dict)
    """By the name of the held-out set, the order of which is the recipe's."""

    @property
    def several_sets(self) -> Mapping[str, EvaluationScores]:
        """Return the sets if there are several: one alone is what is overall."""
        return self.by_set if len(self.by_set) > 1 else {}

    @property
    def parts(self) -> tuple[str, Mapping[Any, EvaluationScores]]:
        """Return what a table has a row for: the sets or, of one set, its difficulties."""
        sets = self.several_sets
        return ("set", sets) if sets else ("difficulty", self.by_difficulty)
