"""Rewards and passes: one rule decides what passes, in Python and in SQL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from io import StringIO
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from areal_flow.config import Recipe, build_recipe
from areal_flow.core.errors import ConfigError
from areal_flow.core.pass_rates import (
    PASS_RATE,
    evaluation_scores,
    has_plateaued,
    majority_vote,
    normal_interval,
    pass_at,
    passes,
    sizes,
    tabulate,
    wilson_interval,
)
from areal_flow.core.types import Score, Verdict
from areal_flow.log import ledger_row
from areal_flow.log.database import connect, consumption_table, read_sql
from areal_flow.log.ledger import STEPS
from areal_flow.rewards.protocol import RewardInput, RewardSettings
from areal_flow.rewards.registry import WeightedRewards
from areal_flow.rewards.shipping import ship_function
from areal_flow.tracking.projection import held_out_metrics
from pipelines.cli.reports import report_evaluation
from pipelines.console.progress import Lines, Progress
from pipelines.console.tables import samples_text
from pipelines.jobs.evaluate import EvaluationResult
from tests.rows import group_table

finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.one_of(st.none(), finite), finite)
def test_sql_and_python_agree_on_what_passes(reward: float | None, threshold: float) -> None:
    with closing(duckdb.connect()) as connection:
        connection.execute(read_sql("passing"))
        query = "SELECT passes($reward::DOUBLE, $threshold::DOUBLE)"
        passed_in_sql = connection.execute(
            query, {"reward": reward, "threshold": threshold}
        ).fetchall()
    assert passed_in_sql == [(passes(reward, threshold=threshold),)]


def test_completion_passes_above_the_threshold_and_not_at_it() -> None:
    assert Recipe().pass_threshold == 0.5
    assert [passes(reward, threshold=0.5) for reward in (None, 0.0, 0.5, 0.51)] == [
        *(False, False, False, True)
    ]
    assert passes(-1.0, threshold=-2.0)


def test_threshold_that_nothing_can_pass_is_refused() -> None:
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="pass_threshold"):
            build_recipe({"pass_threshold": wrong}, source="test")


@pytest.mark.parametrize(
    ("returned", "weight", "threshold", "verdict"),
    [
        (0.25, 1.0, 0.5, "incorrect"),
        (0.5, 1.0, 0.5, "incorrect"),
        (0.75, 1.0, 0.5, "correct"),
        (0.25, 1.0, 0.2, "correct"),
        (0.25, 4.0, 0.5, "correct"),
        (Score(0.25, "correct"), 1.0, 0.5, "correct"),
        (Score(1.0, "parse_error"), 1.0, 0.5, "parse_error"),
    ],
)
def test_bare_number_is_right_if_its_completion_passes(
    tmp_path: Path, returned: Any, weight: float, threshold: float, verdict: Verdict
) -> None:
    name = ship_function(lambda completion: returned, tmp_path)
    settings = [RewardSettings(verifier=name, weight=weight)]
    rewards = WeightedRewards(settings, tmp_path, pass_threshold=threshold)
    (score,) = asyncio.run(rewards.score([RewardInput("", "", "")]))
    assert score.verdict == verdict


def answers(*rewards: float | None, difficulty: int = 1) -> list[dict[str, Any]]:
    made = {"difficulty": difficulty, "num_output_tokens": 4, "sample": 0}
    return [
        {**made, "held_out": "held_out", "prompt_id": f"{difficulty}-{index}", "reward": reward}
        for index, reward in enumerate(rewards)
    ]


def test_constant_reward_of_a_half_passes_nothing_and_is_a_mean_of_a_half() -> None:
    table = tabulate([*answers(*[0.5] * 8), *answers(1.0, 0.0, difficulty=2)], threshold=0.5)
    half = table.by_difficulty[1]
    assert (half.passed.pass_rate, half.reward.reward_mean, half.mean_tokens) == (0.0, 0.5, 4.0)
    assert table.by_difficulty[2].passed.pass_rate == 0.5
    assert (table.overall.passed.pass_rate, table.overall.passed.n) == (0.1, 10)


def test_answer_without_a_reward_has_not_passed_and_is_no_part_of_the_mean() -> None:
    scores = evaluation_scores(answers(1.0, None), threshold=0.5)
    assert (scores.passed.pass_rate, scores.passed.n) == (0.5, 2)
    assert (scores.reward.reward_mean, scores.reward.n) == (1.0, 1)


@pytest.mark.parametrize("n", [1, 7, 64, 1024])
def test_every_pass_rate_is_within_its_interval(n: int) -> None:
    for num_passed in range(n + 1):
        interval = wilson_interval(num_passed, n)
        assert 0 <= interval.low <= interval.pass_rate <= interval.high <= 1


def test_pass_rates_have_wilsons_intervals() -> None:
    half = wilson_interval(50, 100)
    assert (half.low, half.high) == pytest.approx((0.4038315, 0.5961685), abs=1e-6)
    none = wilson_interval(0, 10)
    assert (none.low, none.high) == pytest.approx((0.0, 0.2775328), abs=1e-6)
    assert wilson_interval(0, 0).n == 0


def test_mean_rewards_have_normal_intervals() -> None:
    """Of 1, 2, 3, 4: mean 2.5, s = sqrt(5/3) = 1.2909944, half = 1.959964 s / 2 = 1.2651514."""
    interval = normal_interval([1.0, 2.0, 3.0, 4.0])
    assert interval.reward_mean == 2.5
    assert (interval.low, interval.high) == pytest.approx((1.2348486, 3.7651514), abs=1e-6)
    assert (normal_interval([3.0]).low, normal_interval([3.0]).high) == (3.0, 3.0)
    assert normal_interval([]).n == 0


def test_views_have_a_column_of_what_passed() -> None:
    rows = group_table(0, rewards=(0.25, 0.75, None))
    consumption = consumption_table(STEPS.empty_table(), rows)
    tables = {
        "stored": rows,
        "consumption": consumption,
        "stored_evaluations": pa.table({"reward": pa.array([0.25, 0.75, None], pa.float64())}),
    }
    options: dict[str, Any] = {"decode": lambda tokens: tokens, "max_staleness": 0}
    for threshold, expected in ((0.5, [False, True, False]), (0.2, [True, True, False])):
        with closing(connect(tables, **options, pass_threshold=threshold)) as connection:
            for view, order in (("trajectories", "trajectory_id"), ("evaluations", "reward")):
                query = f"SELECT passed FROM {view} ORDER BY {order}"
                assert [passed for (passed,) in connection.sql(query).fetchall()] == expected


def test_progress_shows_reward_and_pass_apart() -> None:
    file = StringIO()
    counts = ("staleness_max", "staleness_mean")
    row = {
        **dict.fromkeys((*ledger_row.SPEED_COLUMNS, *counts), 1),
        "step": 1,
        "completion_tokens_mean": 3.0,
    }
    lines = Progress(4, 1, screen=Lines(Console(file=file, width=300)))
    lines.step({**row, "reward_mean": 0.5, "metrics": {PASS_RATE: 0.125}})
    assert "step 1/4  reward 0.500  pass 0.125  length 3.0" in file.getvalue()


def test_evaluation_is_reported_with_both_labelled() -> None:
    table = tabulate(answers(0.25, 0.75), threshold=0.5)
    report = report_evaluation(EvaluationResult(table, [], "m", policy_version=3))
    assert (report.data["model"], report.data["policy_version"]) == ("m", 3)
    overall = report.data["overall"]
    assert (overall["pass_rate"], overall["reward_mean"], overall["n"]) == (0.5, 0.5, 2)
    assert overall["pass_rate_low"] < 0.5 < overall["pass_rate_high"]
    (shown,) = report.parts
    assert shown.rows[-1]["mean reward, 95%"].startswith("0.500"), "and no JSON"
    assert [row["difficulty"] for row in shown.rows] == ["all"], "as in the summary of a run"


def sampled(*prompts: Sequence[float | None]) -> list[dict[str, Any]]:
    """Return answers with several samples a prompt."""
    made = {"held_out": "held_out", "difficulty": 1, "num_output_tokens": 4, "reward_detail": "{}"}
    return [
        {**made, "prompt_id": f"p{index}", "sample": sample, "reward": reward}
        for index, rewards in enumerate(prompts)
        for sample, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 1), (4, 2), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_choices_of_k_samples_with_one_that_passed(
    n: int, k: int
) -> None:
    for num_passed in range(n + 1):
        samples = [True] * num_passed + [False] * (n - num_passed)
        choices = [any(chosen) for chosen in combinations(samples, k)]
        assert pass_at(k, n, num_passed) == pytest.approx(fmean(choices))


def test_several_samples_give_pass_at_k_and_intervals_over_prompts() -> None:
    """Prompts pass in 4, 2, 0 and 0 of 4 samples: pass@1 3/8, pass@2 (1 + 5/6) / 4, pass@4 1/2."""
    scores = evaluation_scores(
        sampled([1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0], [0, None, 0, 0]), threshold=0.5
    )
    assert (scores.num_samples, scores.passed.n, scores.passed.pass_rate) == (4, 4, 0.375)
    assert scores.pass_at == pytest.approx({2: (1 + 5 / 6) / 4, 4: 0.5})
    assert scores.by_name()["pass_at_4"] == 0.5
    assert scores.by_name()["best_of_4"] == 0.5
    assert "majority_of_4" not in scores.by_name(), "no verifier said what the answers are"
    over_prompts = normal_interval([1.0, 0.5, 0.0, 0.0])
    assert (scores.passed.low, scores.passed.high) == (0.0, pytest.approx(over_prompts.high))
    assert scores.reward.reward_mean == 0.375


def test_several_samples_give_the_best_reward_and_the_vote() -> None:
    rows = sampled([0.2, 0.9, 0.2], [0.4, None, 0.1], [None, None, None])
    for row, answer in zip(rows, ["7", "8", "7", "3", "", "4", "", "", ""], strict=True):
        row["reward_detail"] = json.dumps({"extracted": answer})
    scores = evaluation_scores(rows, threshold=0.3)
    assert scores.best_of == pytest.approx((0.9 + 0.4) / 2)
    assert scores.majority == pytest.approx((0 + 0.5 + 0) / 3)
    assert samples_text(scores).endswith("best reward 0.650, majority 0.167")


@pytest.mark.parametrize(
    ("answers", "passed", "expected"),
    [
        (["7", "7", "8"], [True, True, False], 1.0),
        (["7", "8", "8"], [True, False, False], 0.0),
        (["7", "8", ""], [True, False, False], 0.5),
        (["", "", "7"], [False, False, True], 1.0),
        (["", ""], [True, True], None),
    ],
)
def test_majority_vote_is_the_most_frequent_answer(
    answers: list[str], passed: list[bool], expected: float | None
) -> None:
    assert majority_vote(answers, passed) == expected


def test_prompts_that_share_an_id_are_two_prompts() -> None:
    scores = evaluation_scores([*answers(1.0), *answers(0.0)], threshold=0.5)
    assert (scores.passed.n, scores.passed.pass_rate, scores.num_samples) == (2, 0.5, 1)
    assert scores.pass_at == {}


def test_each_held_out_set_has_its_own_numbers_and_overall_each_prompt_counts_once() -> None:
    rows = [{**row, "held_out": "code"} for row in sampled([1, 1], [1, 0], [0, 0])]
    table = tabulate([*sampled([1, 1]), *rows], threshold=0.5)
    assert {name: scores.passed.pass_rate for name, scores in table.by_set.items()} == {
        "held_out": 1.0,
        "code": 0.5,
    }
    assert (table.overall.passed.n, table.overall.passed.pass_rate) == (4, 0.625)
    metrics = held_out_metrics(table)
    assert metrics["held_out/pass_at_2"] == 0.75
    assert metrics["held_out/code/pass_at_2"] == pytest.approx(2 / 3)
    report = report_evaluation(EvaluationResult(table, [], "m"))
    assert [*report.data["by_set"]] == ["held_out", "code"]
    assert [row["set"] for row in report.parts[0].rows] == ["held_out", "code", "all"]
    of_one = held_out_metrics(tabulate(rows, threshold=0.5))
    assert not any(name.startswith("held_out/code") for name in of_one), "it is what is overall"


def test_sets_with_other_numbers_of_samples_have_the_pass_at_k_of_theirs() -> None:
    """Overall each prompt counts once, and pass@k is of no more samples than each prompt has."""
    code = [{**row, "held_out": "code"} for row in sampled([1, 1, 0, 0], [0, 0, 0, 0])]
    table = tabulate([*sampled([1, 0]), *code], threshold=0.5)
    metrics = held_out_metrics(table)
    assert metrics["held_out/code/pass_at_2"] == pytest.approx((5 / 6 + 0) / 2)
    assert metrics["held_out/code/pass_at_4"] == 0.5
    assert metrics["held_out/code/best_of_4"] == 0.5
    assert metrics["held_out/held_out/pass_at_2"] == 1.0
    assert metrics["held_out/pass_rate"] == pytest.approx((0.5 + 0.5 + 0) / 3)
    assert metrics["held_out/pass_at_2"] == pytest.approx((1 + 5 / 6 + 0) / 3)
    assert {"pass_at_4", "best_of_2", "best_of_4"}.isdisjoint(table.overall.by_name())
    assert samples_text(table.overall) == "2 to 4 samples each: pass@2 0.611"


def test_one_sample_of_some_prompts_and_several_of_others_has_a_normal_interval() -> None:
    code = [{**row, "held_out": "code"} for row in sampled([1, 0], [0, 0])]
    scores = tabulate([*sampled([1]), *code], threshold=0.5).overall
    over_prompts = normal_interval([1.0, 0.5, 0.0])
    assert scores.passed.high == min(1.0, over_prompts.high)
    assert scores.pass_at == {}
    assert samples_text(scores) == "1 to 2 samples each"


def test_ks_are_powers_of_two_and_all_samples() -> None:
    assert [sizes(n) for n in (1, 2, 4, 6)] == [[], [2], [2, 4], [2, 4, 6]]


def test_plateau_is_as_many_evaluations_without_a_better_rate_than_all_before() -> None:
    assert not has_plateaued([0.3, 0.2, 0.1], patience=0)
    assert not has_plateaued([0.3, 0.2], patience=2), "only one was no better"
    assert has_plateaued([0.3, 0.2, 0.3], patience=2), "an equal rate is no better"
    assert not has_plateaued([0.3, 0.2, 0.31], patience=2)
    assert not has_plateaued([0.1, 0.3, 0.2], patience=2)
    assert has_plateaued([0.1, 0.3, 0.2, 0.1], patience=2)


def test_plateau_without_evaluations_beside_training_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set evaluation.every_steps"):
        build_recipe({"evaluation": {"early_stopping_patience": 2}}, source="test")
