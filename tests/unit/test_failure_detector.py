"""Hung workers are detected, busy ones are spared, and an observer that slept blames nobody."""

from __future__ import annotations

from typing import Any

from areal_flow.cluster.health import FailureDetector, LivenessSample


class Looks:
    """A detector and its latest verdict on the workers."""

    def __init__(self) -> None:
        self._detector = FailureDetector(heartbeat_timeout_s=10.0, lost_after_s=60.0)

    def look(self, now: float, *, heartbeat_s: float = 0.0, **workers: tuple[Any, ...]) -> None:
        signs = {name: LivenessSample(*seen) for name, seen in workers.items()}
        self._found = self._detector.observe(signs, now=now, heartbeat_s=heartbeat_s)

    def hung(self) -> list[str]:
        return [name for name, silence in self._found.items() if silence.is_hung]

    def silence_s(self, worker: str) -> float:
        return self._found[worker].silent_s


def test_stopped_worker_is_hung_after_the_threshold_and_not_before() -> None:
    looks = Looks()
    for second in range(11):
        looks.look(second, stopped=(0.0, 5.0), healthy=(second, 5.0))
        assert looks.hung() == []
    looks.look(11, stopped=(0.0, 5.0), healthy=(11, 5.0))
    assert looks.hung() == ["stopped"]
    assert looks.silence_s("stopped") == 11
    assert looks.silence_s("healthy") == 0


def test_silent_worker_that_computes_is_spared_until_it_counts_as_lost() -> None:
    looks = Looks()
    for second in range(61):
        looks.look(second, importing=(0.0, 0.1 * second))
        assert looks.hung() == []
    looks.look(61, importing=(0.0, 6.1))
    assert looks.hung() == ["importing"]


def test_worker_that_waits_for_slow_storage_is_spared_until_it_counts_as_lost() -> None:
    looks = Looks()
    for second in range(61):
        looks.look(second, writing=(0.0, 1.0, True))
        assert looks.hung() == []
    looks.look(61, writing=(0.0, 1.0, True))
    assert looks.hung() == ["writing"]


def test_clock_that_differs_or_jumps_is_no_silence() -> None:
    looks = Looks()
    for second in range(100):
        looks.look(second, skewed=((-1) ** second * 3600.0 * second, 1.0))
        assert looks.hung() == []


def test_little_work_counts_once_it_adds_up() -> None:
    looks = Looks()
    for second in range(50):
        looks.look(second, slow=(0.0, 0.02 * second))
    assert looks.hung() == []


def test_worker_whose_processor_time_nobody_knows_is_judged_by_its_silence() -> None:
    looks = Looks()
    for second in range(12):
        looks.look(second, elsewhere=(0.0, None))
    assert looks.hung() == ["elsewhere"]


def test_observer_that_slept_blames_nobody() -> None:
    looks = Looks()
    looks.look(0, worker=(0.0, 1.0))
    looks.look(3600, worker=(0.0, 1.0))
    assert looks.hung() == []
    assert looks.silence_s("worker") == 2
    looks.look(3601, worker=(3600.5, 1.0))
    assert looks.silence_s("worker") == 0


def test_worker_that_was_replaced_begins_anew() -> None:
    looks = Looks()
    for second in range(12):
        looks.look(second, worker=(0.0, 1.0))
    assert looks.hung() == ["worker"]
    looks.look(12, worker=(0.0, 1.0))
    assert looks.hung() == []
    assert looks.silence_s("worker") == 0
    looks.look(13)
    looks.look(14, worker=(0.0, 1.0))
    assert looks.silence_s("worker") == 0


def test_worker_among_so_many_that_it_is_seldom_heard_is_not_silent_in_between() -> None:
    looks = Looks()
    for second in range(60):
        looks.look(second, heartbeat_s=12.0, seldom=(second // 12, None))
        assert (looks.hung(), looks.silence_s("seldom")) == ([], 0)
    for second in range(60, 71):  # last heard at 48
        looks.look(second, heartbeat_s=12.0, seldom=(4, None))
        assert looks.hung() == []
    looks.look(71, heartbeat_s=12.0, seldom=(4, None))
    assert looks.hung() == ["seldom"]
