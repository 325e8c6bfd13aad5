"""The thread that keeps a sink up to date: it blocks nobody, and tolerates an unreachable sink."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import pytest

from areal_flow.config import Recipe, TrackingSettings
from areal_flow.core.layout import RunLayout
from areal_flow.tracking import registry
from areal_flow.tracking.projection import Projection
from areal_flow.tracking.registry import RunTracking, start_tracking
from tests.checkpoints import write_fake_checkpoint
from tests.fakes import MemoryTracker
from tests.tracked_runs import append_steps, make_run


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return make_run(tmp_path / "r")


def wait_until(happened: Callable[[], bool]) -> None:
    until = monotonic() + 30
    while not happened():
        assert monotonic() < until
        sleep(0.02)


def test_thread_delivers_each_step_when_it_is_woken(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "DELIVER_EVERY_S", 0.05)
    sink = MemoryTracker()
    tracking = RunTracking(layout, sink)
    for step in (4, 5):
        append_steps(layout, step)
        tracking.wake()
        wait_until(lambda step=step: sink.delivered == step)  # type: ignore[misc]
    tracking.close("FINISHED")
    assert sink.status == "FINISHED"


def test_steps_that_follow_quickly_are_delivered_together_and_the_end_waits_for_no_pause(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliveries = []

    class CountingProjection(Projection):
        def deliver(self) -> int:
            deliveries.append(super().deliver())
            return deliveries[-1]

    monkeypatch.setattr(registry, "Projection", CountingProjection)
    sink = MemoryTracker()
    tracking = RunTracking(layout, sink)
    tracking.wake()
    wait_until(lambda: len(deliveries) == 1)
    for step in (4, 5, 6):
        append_steps(layout, step)
        tracking.wake()
    began = monotonic()
    tracking.close("FINISHED")
    assert monotonic() - began < registry.DELIVER_EVERY_S
    assert deliveries == [3, 3]
    assert sink.status == "FINISHED"


def test_sink_that_is_away_blocks_nobody_and_is_filled_when_it_is_back(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "DELIVER_EVERY_S", 0.05)
    sink = MemoryTracker()
    sink.away = True
    tracking = RunTracking(layout, sink)
    began = monotonic()
    for _ in range(50):
        tracking.wake()
    wait_until(lambda: "the tracker is unreachable" in caplog.text)
    tracking.protected()
    assert monotonic() - began < 2.0
    append_steps(layout, 4)
    sink.away = False
    wait_until(lambda: sink.delivered == 4)
    tracking.close("FINISHED")
    assert list(sink.metrics["train/loss"]) == [1, 2, 3, 4]
    assert caplog.text.count("the tracker is unreachable") == 1, (
        "it does not say so at every attempt"
    )


class Counting(MemoryTracker):
    """An unreachable sink that counts requests."""

    num_requests = 0

    def begin(self) -> int:
        self.num_requests += 1
        raise ConnectionError("away")


def test_unreachable_sink_is_tried_seldom(layout: RunLayout) -> None:
    sink = Counting()
    tracking = RunTracking(layout, sink)
    for _ in range(50):
        tracking.wake()
        sleep(0.01)
    assert sink.num_requests <= 2
    tracking.close("FAILED")


class Hanging(MemoryTracker):
    """A sink that answers after the run has ended."""

    def begin(self) -> int:
        sleep(5)
        return 0


def test_end_waits_for_a_slow_sink_no_longer_than_its_limit(layout: RunLayout) -> None:
    tracking = RunTracking(layout, Hanging())
    began = monotonic()
    tracking.close("FINISHED", timeout_s=0.2)
    assert monotonic() - began < 2


def test_driver_that_was_taken_over_ends_nothing(layout: RunLayout) -> None:
    sink = MemoryTracker()
    tracking = RunTracking(layout, sink)
    tracking.wake()
    wait_until(lambda: sink.delivered == 3)
    tracking.close(None)
    assert sink.status == "RUNNING"


def test_protected_checkpoints_are_recorded_after_each_delivery(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "DELIVER_EVERY_S", 0.05)
    write_fake_checkpoint(layout, 2, weights_hash="w2")
    path = layout.checkpoints / "00000002"
    sink = MemoryTracker()
    tracking = RunTracking(layout, sink)
    tracking.wake()
    wait_until(lambda: path in sink.versions)
    assert tracking.protected() == frozenset()
    sink.aliases["champion"] = path
    tracking.wake()
    wait_until(lambda: tracking.protected() == {path})
    tracking.close("KILLED")
    away = MemoryTracker()
    away.away = True
    later = RunTracking(layout, away)
    assert later.protected() == {path}, "a driver that cannot ask must not prune it"
    later.close("FINISHED")


def test_run_without_tracking_makes_no_thread_and_no_file(layout: RunLayout) -> None:
    before = set(layout.root.rglob("*"))
    tracking = start_tracking(layout, Recipe(tracking=TrackingSettings(enabled=False)))
    tracking.wake()
    assert tracking.protected() == frozenset()
    tracking.close("FINISHED")
    assert tracking.model_version is None
    assert set(layout.root.rglob("*")) == before
