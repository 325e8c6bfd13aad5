"""Generators that the autoscaler adds may wait in a queue, and delay no later change."""

from __future__ import annotations

import asyncio

import pytest

from areal_flow.cluster.pool import Autoscaler, WorkerPool
from areal_flow.flow.diagnosis import SETTLING_STEPS, WINDOW_STEPS
from tests.unit.test_balance import row
from tests.unit.test_pool import TWO, FakeLauncher, with_pool


async def window(autoscaler: Autoscaler, *, demand: float, number: int) -> None:
    for _ in range(SETTLING_STEPS + WINDOW_STEPS):
        autoscaler.after_step(row(demand, number))
    await asyncio.sleep(10)


def names(pool: WorkerPool) -> list[str]:
    return [record.name for record in pool.registry.expected("generator")]


def test_addition_that_waits_in_the_queue_is_followed_by_changes_and_withdrawn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        await pool.start_until_joined(TWO)
        autoscaler = Autoscaler(pool, (1, 8))
        launcher.queued |= {"generator-2", "generator-3"}
        await window(autoscaler, demand=4.0, number=2)
        assert names(pool) == ["generator-0", "generator-1", "generator-2", "generator-3"]
        await window(autoscaler, demand=3.0, number=2)
        assert len(names(pool)) == 3, "one of those that wait is enough"
        await window(autoscaler, demand=0.5, number=2)
        assert names(pool) == ["generator-0"]
        assert set(launcher.running) == {"generator-0"}
        await window(autoscaler, demand=2.0, number=1)
        assert len(pool.generators()) == 2, "it may add some again"
        assert "no more than" not in caplog.text

    with_pool(test)


def test_addition_that_fails_lowers_the_bound_and_leaves_the_others() -> None:
    async def test(pool: WorkerPool, launcher: FakeLauncher) -> None:
        await pool.start_until_joined(TWO)
        autoscaler = Autoscaler(pool, (1, 8))
        launcher.broken["generator-3"] = "exit status 1: no memory"
        await window(autoscaler, demand=4.0, number=2)
        assert names(pool) == ["generator-0", "generator-1", "generator-2"]
        await window(autoscaler, demand=8.0, number=3)
        assert len(names(pool)) <= 3

    with_pool(test)
