"""Verdicts of the report on a run's health, from numbers alone."""

from __future__ import annotations

import pytest

from areal_flow.config import Recipe
from areal_flow.config.recipe import ControllerSettings
from areal_flow.core.pass_rates import PassRate
from pipelines.pages import report
from pipelines.pages.report import (
    judge_entropy,
    judge_failures,
    judge_pass_rate,
    judge_run,
    judge_staleness,
)

TOTALS = {"staleness_mean": 1.44, "masked_fraction": 0.0, "num_failed_members": 0}
LOW, MIDDLE, HIGH = (PassRate(x, x - 0.1, x + 0.1, 90) for x in (0.3, 0.45, 0.95))


@pytest.mark.parametrize(
    ("first", "last", "mark", "text"),
    [
        (LOW, HIGH, "good", "Held-out pass rate rose from 0.30 to 0.95"),
        (HIGH, LOW, "bad", "Held-out pass rate fell from 0.95 to 0.30"),
        (LOW, MIDDLE, "open", "Held-out pass rate went from 0.30 to 0.45: no clear difference"),
    ],
)
def test_pass_rate_moved_only_where_its_intervals_are_apart(
    first: PassRate, last: PassRate, mark: str, text: str
) -> None:
    verdict = judge_pass_rate([first, last], subject="Held-out pass rate", equal_groups=0.1)
    assert (verdict.mark, verdict.text) == (mark, text)
    assert f"{first.low:.3f} to {first.high:.3f}" in verdict.detail


def test_groups_that_teach_nothing_are_reported_and_explain_a_lack_of_progress() -> None:
    reason = "60% of groups taught nothing"
    for last, mark in ((MIDDLE, "look"), (HIGH, "good")):
        verdict = judge_pass_rate([LOW, last], subject="Pass rate", equal_groups=0.6)
        assert verdict.mark == mark
        assert reason in verdict.detail
    assert (
        "taught" not in judge_pass_rate([LOW, HIGH], subject="Pass rate", equal_groups=0.5).detail
    )


@pytest.mark.parametrize(
    ("first", "last", "mark", "text"),
    [
        (1.2, 0.4, "good", "Entropy fell from 1.20 to 0.40: still exploring"),
        (1.2, 1.3, "good", "Entropy rose from 1.20 to 1.30: still exploring"),
        (1.2, 1.201, "good", "Entropy stayed at 1.20: still exploring"),
        (1.2, 0.11, "bad", "Entropy fell from 1.20 to 0.11: the policy stopped exploring"),
        (1.2, 2.5, "look", "Entropy rose from 1.20 to 2.50: the policy may forget what it could"),
        (0.0, 0.0, "good", "Entropy stayed at 0.00: still exploring"),
    ],
)
def test_entropy_is_judged_by_its_share_of_the_first(
    first: float, last: float, mark: str, text: str
) -> None:
    verdict = judge_entropy(first, last)
    assert (verdict.mark, verdict.text) == (mark, text)


def test_staleness_is_judged_by_the_tokens_that_it_cost() -> None:
    assert judge_staleness(1.44, 4, masked=0.0).text == "Mean staleness 1.4 of at most 4"
    assert judge_staleness(1.44, 4, masked=0.1).mark == "good"
    assert judge_staleness(1.44, 4, masked=0.11).mark == "look"


@pytest.mark.parametrize(
    ("failed", "truncated", "skipped", "mark"),
    [
        (0.0, 0.1, 0.0, "good"),
        (0.0, 0.11, 0.0, "look"),
        (0.01, 0.0, 0.0, "look"),
        (0.051, 0.0, 0.0, "bad"),
        (0.0, 0.0, 0.01, "bad"),
    ],
)
def test_failures_are_of_completions_and_of_updates(
    failed: float, truncated: float, skipped: float, mark: str
) -> None:
    verdict = judge_failures(failed, truncated=truncated, skipped=skipped)
    assert verdict.mark == mark
    assert ("No completion failed" in verdict.text) == (not failed)


def test_batches_are_compared_where_there_are_no_two_evaluations() -> None:
    recipe = Recipe(controller=ControllerSettings(batch_size=512, group_size=16))
    steps = [{"rollout/pass_rate": rate, "entropy_mean": 1.0} for rate in [0.3] * 8 + [0.9] * 8]
    first, *_ = judge_run(recipe, steps, TOTALS, [LOW])
    assert first.text == "Pass rate of batches rose from 0.30 to 0.90"
    first, *_ = judge_run(recipe, steps, TOTALS, [LOW, HIGH])
    assert first.text.startswith("Held-out pass rate rose")


def test_batches_that_another_verifier_scored_are_not_compared() -> None:
    recipe = Recipe(controller=ControllerSettings(batch_size=512, group_size=16))
    rates = {"numeric@0": 0.3, "numeric@1": 0.9}
    steps = [
        {"rollout/pass_rate": rates[verifier], "verifier": verifier}
        for verifier in rates
        for _ in range(8)
    ]
    first, *_ = judge_run(recipe, steps, TOTALS, [LOW])
    assert first.text == "Pass rate of batches went from 0.90 to 0.90: no clear difference"


def test_one_step_without_metrics_is_judged_by_what_there_is() -> None:
    judged = judge_run(Recipe(), [{"rollout/pass_rate": 0.5}], TOTALS, [])
    assert [verdict.subject for verdict in judged] == ["Pass rate", "Staleness", "Failures"]
    assert judged[0].mark == "open"


def test_report_says_what_limits_the_speed_as_the_dashboard_does() -> None:
    seconds = {"read_s": 0.1, "train_s": 0.2, "stage_s": 0.1}
    numbers = {"num_generated_tokens": 8, "num_trained_tokens": 8, "rollout/pass_rate": 0.5}
    step = {**seconds, **numbers, "step_s": 1.0, "wait_s": 0.6, "generate_s": 0.9}
    (speed,) = (v for v in judge_run(Recipe(), [step], TOTALS, []) if v.subject == "Speed")
    assert (speed.mark, speed.text[:28]) == ("look", "Generation is the bottleneck")
    assert "cluster.num_generators" in speed.detail


def test_start_and_now_do_not_overlap() -> None:
    assert report.ends([{"x": n} for n in range(4)], "x") == (0.5, 2.5)
    assert report.ends([{"x": n} for n in range(100)], "x") == (3.5, 95.5)
    assert report.ends([{"x": None}, {"x": 2.0}], "x") == (None, 2.0)
