"""Completions that crash reward workers, beside others that wait for the same workers."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from areal_flow.cluster.launch import launch_cluster
from areal_flow.cluster.placement import WorkerPlacement, worker_environment
from areal_flow.cluster.registry import Executions
from areal_flow.cluster.scoring import KillsWorkers, run_reward_task
from areal_flow.cluster.worker import WorkerContext
from areal_flow.config.cluster import ClusterSettings
from areal_flow.flow.flow_setup import RetryBudget

REWARD = WorkerPlacement("reward-0", "reward", 1, worker_environment(1))
POISONED = (1, 4)


@pytest.mark.slow
async def test_tasks_that_wait_beside_those_that_kill_their_worker_get_their_results(
    tmp_path: Path,
) -> None:
    def judge(number: int) -> int:
        if number in (1, 4):
            os._exit(3)
        time.sleep(0.05)
        return number

    async with launch_cluster([REWARD], ClusterSettings(), WorkerContext(tmp_path, 1)) as cluster:
        executions: Executions = cluster.pool.executions
        budgets = [RetryBudget(1)]
        tasks = [
            run_reward_task(cluster.client, executions, judge, n, budgets=budgets) for n in range(8)
        ]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        (record,) = cluster.pool.registry.all()
        # One that only waited when the other one killed is tried again, and kills once more.
        assert 2 * len(POISONED) <= len(record.deaths) <= 3 * len(POISONED)
        assert not record.is_quarantined
    for number, result in enumerate(results):
        assert isinstance(result, KillsWorkers) if number in POISONED else result == number
    assert not list((tmp_path / "processes").iterdir()), "keys and notes end with their driver"
