"""Pass rates: what passes, means of an evaluation with 95% intervals, comparisons of two models.

The rule of what passes stands here and in SQL in `log/sql/passing.sql`; a test holds both equal.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import comb, sqrt
from operator import itemgetter
from statistics import fmean, stdev
from typing import Any

from areal_flow.core.errors import ModelError
from areal_flow.core.types import Verdict

PASS_THRESHOLD = 0.5
"""Halfway between wrong and right of a verifier that gives 0 and 1."""
PASS_RATE = "rollout/pass_rate"
"""The pass rate of a step's trajectories, in the ledger's `metrics` and in sinks."""
HELD_OUT = "held_out"
"""The name of the held-out set that the training source itself gives."""
Row = Mapping[str, Any]
Z_95 = 1.959963984540054


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


def passes(reward: float | None, *, threshold: float) -> bool:
    """Return whether a completion passes: its reward is above the threshold; none never is."""
    return reward is not None and reward > threshold


def verdict_of(reward: float, *, threshold: float) -> Verdict:
    return "correct" if passes(reward, threshold=threshold) else "incorrect"


def tabulate(rows: Sequence[Mapping[str, Any]], *, threshold: float) -> EvaluationTable:
    difficulty = itemgetter("difficulty")
    by_difficulty = groupby(sorted(rows, key=difficulty), difficulty)
    return EvaluationTable(
        evaluation_scores(rows, threshold=threshold),
        {k: evaluation_scores([*part], threshold=threshold) for k, part in by_difficulty},
        {k: evaluation_scores(part, threshold=threshold) for k, part in rows_by_set(rows).items()},
    )


def rows_by_set(rows: Sequence[Row]) -> dict[str, list[Row]]:
    by_set = defaultdict[str, list[Row]](list)
    for row in rows:
        by_set[row["held_out"]].append(row)
    return dict(by_set)


def evaluation_scores(rows: Sequence[Mapping[str, Any]], *, threshold: float) -> EvaluationScores:
    """Return pass rate, mean reward and mean length of some answers: rows of the evaluation schema.

    An answer without a reward has not passed, and is no part of the mean reward. Samples of one
    prompt resemble one another, so intervals are over prompts, each with the mean of its samples:
    normal ones, and Wilson's where each has one sample. Where some prompts have more samples than
    others, k of pass@k is at most the fewest, and there is neither a best sample nor a majority.
    """
    by_prompt = _by_prompt(rows)
    counts = [*map(len, by_prompt)] or [1]
    num_samples, min_samples = max(counts), min(counts)
    passed = [[passes(row["reward"], threshold=threshold) for row in p] for p in by_prompt]
    scored = [[row["reward"] for row in p if row["reward"] is not None] for p in by_prompt]
    best_of, majority = None, None
    if num_samples == min_samples > 1:
        best_of = fmean(max(rewards) for rewards in scored if rewards) if any(scored) else None
        votes = [*map(majority_vote, map(_extracted, by_prompt), passed)]
        has_votes = any(vote is not None for vote in votes)
        majority = fmean(vote or 0.0 for vote in votes) if has_votes else None
    return EvaluationScores(
        _pass_rate(passed, num_samples=num_samples),
        normal_interval([fmean(rewards) for rewards in scored if rewards]),
        sum(row["num_output_tokens"] for row in rows) / max(1, len(rows)),
        num_samples,
        {k: fmean(pass_at(k, len(p), sum(p)) for p in passed) for k in sizes(min_samples)},
        best_of,
        majority,
        min_samples,
    )


def _by_prompt(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each prompt: a sample of an id that comes twice is of another prompt."""
    by_prompt = defaultdict[tuple[str, str, int], list[Row]](list)
    num_seen = Counter[tuple[str, str, int]]()
    for row in rows:
        prompt = row["held_out"], row["prompt_id"]
        sample = *prompt, row["sample"]
        by_prompt[*prompt, num_seen[sample]].append(row)
        num_seen[sample] += 1
    return [*by_prompt.values()]


def _extracted(rows: Sequence[Row]) -> list[str]:
    """Return what the verifier took for the answer of each sample; empty where it took none."""
    return [json.loads(row["reward_detail"]).get("extracted") or "" for row in rows]


def majority_vote(answers: Sequence[str], passed: Sequence[bool]) -> float | None:
    """Return whether the answer that most samples agree on passes; None without any answer.

    Of equally frequent answers it is the share that passes. An empty answer has no vote.
    """
    votes = Counter(filter(None, answers))
    if not votes:
        return None
    leading = {answer for answer, num in votes.items() if num == max(votes.values())}
    return fmean(ok for answer, ok in zip(answers, passed, strict=True) if answer in leading)


def _pass_rate(passed: Sequence[Sequence[bool]], *, num_samples: int) -> PassRate:
    if num_samples == 1:
        return wilson_interval(sum(map(sum, passed)), len(passed))
    mean = normal_interval([fmean(samples) for samples in passed])
    return PassRate(mean.reward_mean, max(0.0, mean.low), min(1.0, mean.high), mean.n)


def sizes(num_samples: int) -> list[int]:
    """Return the k of which pass@k is shown: powers of two, and all samples; none of one sample."""
    powers = [2**exponent for exponent in range(1, num_samples.bit_length())]
    return sorted({*powers, num_samples} - {1})


def pass_at(k: int, n: int, num_passed: int) -> float:
    """Return pass@k, unbiased: 1 - C(n - c, k) / C(n, k) of c passed among n samples.

    Chen et al. 2021 (arXiv 2107.03374), equation 1.
    """
    return 1.0 - comb(n - num_passed, k) / comb(n, k)


def has_plateaued(rates: Sequence[float], *, patience: int) -> bool:
    """Return whether none of the last `patience` rates is better than the best before them."""
    if not patience or len(rates) <= patience:
        return False
    return max(rates[-patience:]) <= max(rates[:-patience])


def wilson_interval(num_passed: int, n: int) -> PassRate:
    """Return the pass rate with Wilson's 95% score interval (Wilson 1927); all 0 when n is 0."""
    if n == 0:
        return PassRate(0.0, 0.0, 0.0, 0)
    rate = num_passed / n
    spread = 1 + Z_95**2 / n
    center = (rate + Z_95**2 / (2 * n)) / spread
    half = Z_95 / spread * sqrt(rate * (1 - rate) / n + Z_95**2 / (4 * n**2))
    # The rate lies between them; rounded, it may lie a hair beside one that is 0 or 1.
    return PassRate(rate, max(0.0, min(rate, center - half)), min(1.0, max(rate, center + half)), n)


def normal_interval(rewards: Sequence[float]) -> RewardMean:
    """Return the mean with its 95% normal interval, mean ± 1.96 s / √n; no width below two.

    s is the sample's standard deviation (unbiased variance).
    """
    if not rewards:
        return RewardMean(0.0, 0.0, 0.0, 0)
    mean, n = fmean(rewards), len(rewards)
    half = Z_95 * stdev(rewards) / sqrt(n) if n > 1 else 0.0
    return RewardMean(mean, mean - half, mean + half, n)


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """How much better the second of two models is on the same prompts, and how likely by chance."""

    num_prompts: int
    num_better: int
    """Prompts on which more samples of the second pass."""
    num_worse: int
    difference: float
    """Of the pass rates, second minus first."""
    low: float
    high: float
    """The 95% normal interval of the mean difference of a prompt."""
    p_value: float
    """Exact and two-sided; see `sign_test`."""

    def as_json(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}


def compare_answers(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]], *, threshold: float
) -> PairedComparison:
    """Compare two models' answers, rows of the evaluation schema, to the same prompts."""
    rates = [_pass_rates(rows, threshold) for rows in (first, second)]
    if rates[0].keys() != rates[1].keys():
        num_common = len(rates[0].keys() & rates[1].keys())
        raise ModelError(
            f"expected two models on the same prompts, found {num_common} in common of "
            f"{len(rates[0])} and {len(rates[1])}: give --data FILE, in Python prompts=..."
        )
    differences = [rates[1][prompt] - rates[0][prompt] for prompt in rates[0]]
    num_better = sum(difference > 0 for difference in differences)
    num_worse = sum(difference < 0 for difference in differences)
    mean = normal_interval(differences)
    interval = mean.reward_mean, mean.low, mean.high
    p_value = sign_test(num_better, num_worse)
    return PairedComparison(len(differences), num_better, num_worse, *interval, p_value)


def sign_test(num_better: int, num_worse: int) -> float:
    """Return how likely so uneven a split is if better and worse are equally likely.

    Two-sided, by the binomial distribution; ties do not count. With one sample a prompt it is the
    exact form of McNemar's test (McNemar 1947).
    """
    n = num_better + num_worse
    tail = sum(comb(n, k) for k in range(min(num_better, num_worse) + 1))
    return float(min(1.0, 2 * tail / 2**n))


def _pass_rates(
    rows: Sequence[Mapping[str, Any]], threshold: float
) -> dict[tuple[str, str], float]:
    passed = defaultdict[tuple[str, str], list[bool]](list)
    samples = Counter((row["held_out"], row["prompt_id"], row["sample"]) for row in rows)
    if repeated := next((sample for sample, num in samples.items() if num > 1), None):
        held_out, prompt_id, _ = repeated
        raise ModelError(
            f"cannot pair answers: several prompts of the set {held_out!r} have the id "
            f"{prompt_id!r}; give --data FILE with unique ids, in Python prompts=..."
        )
    for row in rows:
        passed[row["held_out"], row["prompt_id"]].append(passes(row["reward"], threshold=threshold))
    return {prompt: fmean(of) for prompt, of in passed.items()}
