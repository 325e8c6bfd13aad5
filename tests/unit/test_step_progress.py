"""A rank hangs if others wait for it, directly or not, and it uses no processor."""

from __future__ import annotations

import os
import subprocess
import sys
from time import sleep

import pytest

from areal_flow.cluster import step_progress
from areal_flow.cluster.step_progress import StepClock, StepProgress, hung_ranks
from areal_flow.training.replicas import ReplicaGroup


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
    ranks = {
        name: StepProgress(*idle, seconds_since_collective=idle[1]) for name, idle in idle_s.items()
    }
    assert [*hung_ranks(ranks, num_ranks=len(ranks), heartbeat_timeout_s=10.0)] == hung


def test_a_rank_does_not_hang_that_may_wait_for_one_that_does_not_report() -> None:
    assert not hung_ranks({"b": StepProgress(8, 99.0, 99.0)}, num_ranks=2, heartbeat_timeout_s=10.0)


def test_a_rank_is_idle_while_it_neither_computes_nor_exchanges_within_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, used, rank = [0.0], [0.0], ReplicaGroup()
    monkeypatch.setattr(step_progress, "monotonic", lambda: now[0])
    monkeypatch.setattr(step_progress, "_processor_s", lambda: used[0])

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
        assert clock.look(rank).seconds_since_collective == 0.0
        assert idle_s(4, computes=0.5) == 0.0
        assert clock.look(rank).seconds_since_collective == pytest.approx(4.0)
        now[0] += 100.0
        assert idle_s(1) == step_progress.LONGEST_LOOK_S, "it was suspended"
    assert idle_s(1) == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who waits for a processor")
def test_a_rank_that_gets_no_processor_from_others_is_not_idle() -> None:
    """Two processes on one processor: each has half of it, and waits for it in the other half."""
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for child in children:
            os.sched_setaffinity(child.pid, {min(os.sched_getaffinity(0))})
            assert child.stdout
            child.stdout.readline()
        before = step_progress._processor_s()
        sleep(0.5)
        assert step_progress._processor_s() - before > 0.8
    finally:
        for child in children:
            child.kill()
            child.communicate()
