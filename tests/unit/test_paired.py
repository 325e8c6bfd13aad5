"""Two models on the same prompts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from areal_flow.core.errors import ModelError
from areal_flow.core.pass_rates import compare_answers, sign_test


def answers(*rewards: float | None, samples: int = 1) -> list[dict[str, Any]]:
    return [
        {
            "held_out": "sums",
            "prompt_id": f"p{place // samples}",
            "sample": place % samples,
            "reward": reward,
        }
        for place, reward in enumerate(rewards)
    ]


def test_golden_mcnemar() -> None:
    first = answers(*[1.0] * 5, *[0.0] * 9)
    second = answers(*[1.0] * 4, 0.0, *[1.0] * 8, None)
    comparison = compare_answers(first, second, threshold=0.5)
    assert (comparison.num_prompts, comparison.num_better, comparison.num_worse) == (14, 8, 1)
    assert comparison.difference == pytest.approx(7 / 14)
    assert comparison.p_value == 20 / 512
    assert comparison.low < comparison.difference < comparison.high


def test_answers_to_several_prompts_of_one_id_are_not_paired() -> None:
    repeated = [{**row, "prompt_id": "p0"} for row in answers(1.0, 0.0)]
    with pytest.raises(ModelError, match=r"several prompts of the set 'sums' have the id 'p0'"):
        compare_answers(repeated, repeated, threshold=0.5)


@given(st.integers(0, 60), st.integers(0, 60))
def test_p_value_is_that_of_the_exact_binomial_test(better: int, worse: int) -> None:
    expected = binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert sign_test(better, worse) == pytest.approx(expected)


def test_several_samples_are_one_prompt() -> None:
    first = answers(1, 0, 0, 0, 1, 1, samples=2)
    second = answers(1, 1, 0, 0, 1, 0, samples=2)
    comparison = compare_answers(first, second, threshold=0.5)
    assert (comparison.num_prompts, comparison.num_better, comparison.num_worse) == (3, 1, 1)
    assert (comparison.difference, comparison.p_value) == (0.0, 1.0)


def test_other_prompts_are_refused() -> None:
    with pytest.raises(ModelError, match="found 1 in common of 1 and 2: give --data FILE"):
        compare_answers(answers(1), answers(1, 1), threshold=0.5)
