"""Hung workers and ranks are detected, busy ones spared, a suspended observer blames nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from time import sleep
from typing import Any

import pytest

from areal_flow.cluster import liveness
from areal_flow.cluster.liveness import (
    FailureDetector,
    LivenessSample,
    StepClock,
    StepProgress,
    hung_ranks,
)
from areal_flow.training.replicas import ReplicaGroup


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


def test_clock_skew_and_jumps_do_not_count_as_silence() -> None:
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


@pytest.mark.parametrize(
    ("idle_s", "hung"),
    [
        ({}, []),
        ({"a": (7, 0.5), "b": (8, 99.0)}, []),  # b waits for a, which computes
        ({"a": (7, 11.0), "b": (8, 99.0)}, ["a"]),
        ({"a": (7, 11.0), "b": (7, 0.5), "c": (8, 99.0)}, []),  # b has yet to begin what c waits in
        ({"a": (8, 11.0), "b": (8, 12.0)}, ["a", "b"]),  # what both wait in does not end
        ({"a": (7, 11.0), "b": (8, 0.5)}, []),  # b was slow; what a has done since is not known yet
    ],
)
def test_ranks_that_are_waited_for_and_idle_hang(
    idle_s: dict[str, tuple[int, float]], hung: list[str]
) -> None:
    ranks = {name: StepProgress(*idle, since_collective_s=idle[1]) for name, idle in idle_s.items()}
    assert [*hung_ranks(ranks, num_ranks=len(ranks), heartbeat_timeout_s=10.0)] == hung


def test_a_rank_that_may_wait_for_a_silent_one_does_not_count_as_hung() -> None:
    assert not hung_ranks({"b": StepProgress(8, 99.0, 99.0)}, num_ranks=2, heartbeat_timeout_s=10.0)


def test_a_rank_is_idle_while_it_neither_computes_nor_exchanges_within_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, used, rank = [0.0], [0.0], ReplicaGroup()
    monkeypatch.setattr(liveness, "monotonic", lambda: now[0])
    monkeypatch.setattr(liveness, "_processor_s", lambda: used[0])

    clock = StepClock()

    def idle_s(num_looks: int, *, computes: float = 0.0) -> float:
        for _ in range(num_looks):
            now[0] += 1.0
            used[0] += computes
            idle = clock.look(rank).idle_s
        return idle

    assert idle_s(20) == 0.0, "it reads or writes, or nothing is asked of it"
    with rank.within_step():
        assert idle_s(1, computes=0.5) == 0.0
        assert idle_s(5, computes=0.01) == 5.0
        assert idle_s(1, computes=0.2) == 0.0
        assert idle_s(5) == 5.0
        now[0] += 0.1
        assert clock.look(rank).idle_s == 5.0
        rank.num_collectives += 1
        assert idle_s(1) == 0.0
        assert clock.look(rank).since_collective_s == 0.0
        assert idle_s(4, computes=0.5) == 0.0
        assert clock.look(rank).since_collective_s == pytest.approx(4.0)
        now[0] += 100.0
        assert idle_s(1) == liveness.MAX_RANK_LOOK_S, "it was suspended"
    assert idle_s(1) == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who waits for a processor")
def test_a_rank_starved_of_processor_time_is_not_idle() -> None:
    """Two processes on one processor: each has half of it, and waits for it in the other half."""
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for child in children:
            os.sched_setaffinity(child.pid, {min(os.sched_getaffinity(0))})
            assert child.stdout
            child.stdout.readline()
        before = liveness._processor_s()
        sleep(0.5)
        assert liveness._processor_s() - before > 0.8
    finally:
        for child in children:
            child.kill()
            child.communicate()
