"""Runs in the background and callbacks after steps, without a cluster."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import areal_flow
import pipelines.jobs.background
import pipelines.jobs.job
from areal_flow.config import Recipe
from areal_flow.core.errors import ConfigError, RunError, TrainingError
from areal_flow.core.layout import RunLayout
from areal_flow.log.directory import hold_run
from pipelines.jobs.background import BackgroundRun, Status
from pipelines.jobs.job import Job
from pipelines.jobs.stop_signals import Outcome, StopSignals, wait_for
from pipelines.jobs.train import StepCallback
from tests.tracked_runs import make_run

ROW = {"step": 3, "reward_mean": 0.5, "metrics": {"rollout/pass_rate": 0.25}}


async def test_callback_gets_the_row_with_its_metrics_as_columns_in_a_thread() -> None:
    calls: list[tuple[dict[str, Any], bool]] = []
    thread = threading.current_thread()
    callback = StepCallback(lambda row: calls.append((row, threading.current_thread() == thread)))
    assert not await callback.wants_stop(ROW)
    expected = {"step": 3, "reward_mean": 0.5, "rollout/pass_rate": 0.25}
    assert calls == [(expected, False)]
    calls[0][0]["step"] = 7
    assert ROW["step"] == 3


@pytest.mark.parametrize(
    ("returned", "stops"),
    [(None, False), (False, False), (True, True), (np.bool_(True), True), (1.0, False)],
)
async def test_only_true_ends_training(returned: object, stops: bool) -> None:
    assert await StepCallback(lambda _: returned).wants_stop(ROW) is stops


async def test_error_in_a_callback_is_logged_once_with_its_traceback_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def plot(row: dict[str, Any]) -> None:
        if row["step"] != 2:
            raise ValueError("no such axis")

    callback = StepCallback(plot)
    for step in (1, 2, 3):
        assert not await callback.wants_stop({**ROW, "step": step})
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "on_step failed after step 1" in record.getMessage()
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "no such axis"
    callback.report_failures()
    assert caplog.messages[-1] == "on_step failed after 2 of 3 steps"


async def test_no_callback_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    callback = StepCallback(None)
    assert not await callback.wants_stop(ROW)
    callback.report_failures()
    assert not caplog.records


Drive = Callable[..., Any]


@pytest.fixture
def drives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Drive]]:
    """Prepares a run of three steps, and then drives it by the last function of the list."""
    chosen: list[Drive] = []

    async def run_training(layout: RunLayout, recipe: Recipe, **how: Any) -> Outcome:
        return await chosen[-1](how)

    def start(job: Job, layout: RunLayout, recipe: Recipe, **_: Any) -> Outcome:
        make_run(layout.root)
        with hold_run(layout):
            return wait_for(lambda: job.drive(layout, recipe))

    monkeypatch.setattr(pipelines.jobs.background, "run_training", run_training)
    monkeypatch.setattr(pipelines.jobs.job, "start", start)
    monkeypatch.chdir(tmp_path)
    yield chosen
    assert pipelines.jobs.background._current is None


async def until_stopped(_: Any) -> Outcome:
    """Take steps until the first stop, and then finish the step; end at once at the second."""
    requested = asyncio.Event()
    with StopSignals() as signals, signals.finishing_steps(requested.set):
        await requested.wait()
        await asyncio.sleep(0.3)
    return Outcome(False, signals.received[0])


def in_background(name: str = "r", **given: Any) -> BackgroundRun:
    return areal_flow.train(Recipe(), name=name, wait=False, **given)


def test_stop_lets_the_step_finish_and_result_returns_the_run(drives: list[Drive]) -> None:
    drives.append(until_stopped)
    handle = in_background()
    assert handle.status == Status("running", 3, 90)
    assert repr(handle) == "<BackgroundRun r: running, step 3 of 90>"
    assert len(handle.run.steps()) == 4
    with pytest.raises(TimeoutError, match=r"run r goes on after 0\.1 s: running, step 3 of 90"):
        handle.result(timeout=0.1)
    handle.stop()
    assert handle.result(10).layout.name == "r"
    handle.stop()  # the run is over: nothing to stop


def test_second_stop_ends_the_run_at_once(drives: list[Drive]) -> None:
    drives.append(until_stopped)
    handle = in_background()
    handle.stop()
    handle.stop()
    with pytest.raises(KeyboardInterrupt, match=r"stop\(\)"):
        handle.result(10)


def test_error_before_the_start_is_raised_at_once_and_a_later_one_by_result(
    drives: list[Drive],
) -> None:
    async def fail(_: Any) -> Outcome:
        raise TrainingError("the loss is not finite")

    with pytest.raises(ConfigError, match="no such setting"):
        in_background(nonsense=3)
    drives.append(fail)
    handle = in_background()
    for _ in range(2):
        with pytest.raises(TrainingError, match="the loss is not finite"):
            handle.result(10)


def test_second_cluster_in_one_process_is_refused_until_the_run_is_over(
    drives: list[Drive],
) -> None:
    drives.append(until_stopped)
    handle = in_background()
    calls: list[Callable[[], Any]] = [
        lambda: in_background("second"),
        lambda: areal_flow.train(Recipe(), name="second"),
        lambda: areal_flow.evaluate("r"),
        lambda: areal_flow.sft(Recipe()),
    ]
    for call in calls:
        with pytest.raises(RunError, match=r"<BackgroundRun r: .*> uses this process: wait for"):
            call()
    handle.stop()
    handle.result(10)
    second = in_background("second")
    second.stop()
    assert second.result(10).layout.name == "second"


def test_callback_reaches_the_driver(drives: list[Drive]) -> None:
    given: list[Any] = []

    async def drive(how: Any) -> Outcome:
        given.append(how["on_step"])
        return Outcome(True)

    drives.append(drive)
    assert in_background(on_step=print).result(10).layout.name == "r"
    assert given == [print]
