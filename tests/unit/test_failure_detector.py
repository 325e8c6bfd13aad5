"""Hung workers are found, busy ones are spared, and an observer that slept blames nobody."""

from __future__ import annotations

from areal_flow.cluster.health import FailureDetector, SignsOfLife


def watched() -> FailureDetector:
    return FailureDetector(silent_after_s=10.0, lost_after_s=60.0)


def look(liveness: FailureDetector, now: float, **workers: tuple[float, float | None]) -> None:
    liveness.observe({name: SignsOfLife(*signs) for name, signs in workers.items()}, now=now)


def test_stopped_worker_is_hung_after_the_threshold_and_not_before() -> None:
    liveness = watched()
    for second in range(11):
        look(liveness, second, stopped=(0.0, 5.0), healthy=(second, 5.0))
        assert liveness.hung() == []
    look(liveness, 11, stopped=(0.0, 5.0), healthy=(11, 5.0))
    assert liveness.hung() == ["stopped"]
    assert liveness.silence_s("stopped") == 11
    assert liveness.silence_s("healthy") == 0


def test_silent_worker_that_computes_is_spared_until_it_counts_as_lost() -> None:
    liveness = watched()
    for second in range(61):
        look(liveness, second, importing=(0.0, 0.1 * second))
        assert liveness.hung() == []
    look(liveness, 61, importing=(0.0, 6.1))
    assert liveness.hung() == ["importing"]


def test_little_work_counts_once_it_adds_up() -> None:
    liveness = watched()
    for second in range(50):
        look(liveness, second, slow=(0.0, 0.02 * second))
    assert liveness.hung() == []


def test_worker_whose_processor_time_nobody_knows_is_judged_by_its_silence() -> None:
    liveness = watched()
    for second in range(12):
        look(liveness, second, elsewhere=(0.0, None))
    assert liveness.hung() == ["elsewhere"]


def test_observer_that_slept_blames_nobody() -> None:
    liveness = watched()
    look(liveness, 0, worker=(0.0, 1.0))
    look(liveness, 3600, worker=(0.0, 1.0))
    assert liveness.hung() == []
    assert liveness.silence_s("worker") == 2
    look(liveness, 3601, worker=(3600.5, 1.0))
    assert liveness.silence_s("worker") == 0


def test_worker_that_was_replaced_begins_anew() -> None:
    liveness = watched()
    for second in range(12):
        look(liveness, second, worker=(0.0, 1.0))
    liveness.forget("worker")
    look(liveness, 12, worker=(0.0, 1.0))
    assert liveness.hung() == []
    assert liveness.silence_s("worker") == 0
    look(liveness, 13)
    assert liveness.silence_s("worker") == 0
