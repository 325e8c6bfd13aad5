"""Evaluations beside training: each once, one at a time, never delaying training."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from areal_flow.config import build_recipe
from areal_flow.core.errors import EngineError
from areal_flow.core.pass_rates import (
    EvaluationScores,
    EvaluationTable,
    normal_interval,
    wilson_interval,
)
from areal_flow.log.directory import hold_run
from areal_flow.log.run_log import append_evaluation
from pipelines.jobs.periodic_evaluation import (
    PeriodicEvaluations,
    evaluation_name,
    is_flat,
    read_periodic,
)
from tests.finished_runs import answers, make_finished_run


class Evaluating:
    """Runs evaluations when the test lets it; records which."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.made: list[str] = []
        self.let = asyncio.Event()

    async def __call__(self, name: str) -> None:
        self.begun.append(name)
        await self.let.wait()
        if name == evaluation_name(2):
            raise EngineError("no generator lives")
        self.made.append(name)


def periodic(evaluating: Evaluating, **settings: Any) -> PeriodicEvaluations:
    made = settings.pop("made", ())
    evaluation = {"every_steps": 2, **settings}
    recipe = build_recipe({"num_steps": 9, "evaluation": evaluation}, source="test")
    return PeriodicEvaluations(evaluating, recipe, made=made)


def names(*steps: int) -> list[str]:
    return [evaluation_name(step) for step in steps]


async def test_evaluation_is_due_every_so_many_steps_but_not_before_or_after_training() -> None:
    evaluating = Evaluating()
    evaluating.let.set()
    evaluations = periodic(evaluating, every_steps=3)
    for step in range(10):
        evaluations.reached(step)
        await evaluations.settle()
    assert evaluating.made == names(3, 6)


async def test_no_evaluation_is_due_by_default() -> None:
    evaluating = Evaluating()
    evaluations = periodic(evaluating, every_steps=0)
    evaluations.reached(4)
    await evaluations.settle()
    assert evaluating.begun == []


async def test_training_goes_on_and_the_newest_waits_for_the_one_that_is_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    evaluating = Evaluating()
    evaluations = periodic(evaluating)
    for step in (4, 5, 6, 7, 8):
        evaluations.reached(step)
        await asyncio.sleep(0)
    assert evaluating.begun == names(4)
    evaluating.let.set()
    await asyncio.sleep(0.01)
    await evaluations.settle()
    assert evaluating.made == names(4, 8)
    assert "step-00000006 is left out" in caplog.text


async def test_resumed_driver_makes_the_newest_that_is_due_and_has_no_rows() -> None:
    evaluating = Evaluating()
    evaluating.let.set()
    for made, expected in ((names(2), names(4)), (names(2, 4), [])):
        evaluating.made.clear()
        evaluations = periodic(evaluating, made=made)
        evaluations.reached(5)
        await asyncio.sleep(0.01)
        await evaluations.settle()
        assert evaluating.made == expected


async def test_evaluation_that_fails_ends_neither_training_nor_later_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    evaluating = Evaluating()
    evaluating.let.set()
    evaluations = periodic(evaluating)
    for step in (2, 4):
        evaluations.reached(step)
        await asyncio.sleep(0.01)
    await evaluations.settle()
    assert evaluating.made == names(4)
    assert "step-00000002 could not be made: no generator lives" in caplog.text


async def test_stop_cancels_what_is_being_made_and_the_end_waits_for_it() -> None:
    evaluating = Evaluating()
    stopped, ended = periodic(evaluating), periodic(evaluating)
    for evaluations in (stopped, ended):
        evaluations.reached(4)
    await asyncio.sleep(0)
    await stopped.cancel()
    assert evaluating.made == []
    asyncio.get_running_loop().call_later(0.01, evaluating.let.set)
    await ended.settle()
    assert evaluating.made == names(4)


def test_evaluations_of_another_verifier_are_not_read(tmp_path: Path) -> None:
    layout = make_finished_run(tmp_path / "r", num_steps=2, evaluated=False)
    with hold_run(layout) as writer:
        for step, verifier in ((2, "numeric@0"), (4, "numeric@1")):
            rows = answers(evaluation_name(step), step, reward=1.0, text="4", verifier=verifier)
            append_evaluation(layout, rows, writer)
    evaluations = read_periodic(layout, threshold=0.5, verifier="numeric@1")
    assert [*evaluations] == names(4)
    assert evaluations[evaluation_name(4)].overall.passed.pass_rate == 1.0


def test_pass_rates_are_compared_from_before_training_on() -> None:
    def table(num_passed: int) -> EvaluationTable:
        rate = wilson_interval(num_passed, 10)
        return EvaluationTable(EvaluationScores(rate, normal_interval([]), 0.0))

    later, sooner = names(10, 2)
    rising = {"before": table(1), later: table(3), sooner: table(2), "after": table(0)}
    assert not is_flat(rising, patience=1)
    assert is_flat({**rising, "before": table(3)}, patience=2)
