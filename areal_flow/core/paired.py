"""Two models on the same prompts: how much better one is, and how likely that is chance."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean
from typing import Any

from areal_flow.core.errors import ModelError
from areal_flow.core.pass_rates import normal_interval, passes


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Of the second model with the first, prompt by prompt."""

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
