"""The scheduler spreads rollouts evenly, and hears less often from each of many workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest
from distributed import Client, Worker, get_worker

from areal_flow.cluster import scheduler
from areal_flow.cluster.scheduler import FleetScheduler, heartbeat_interval_s


def executed_on(_: int) -> str:
    return str(get_worker().name)


async def start(stack: AsyncExitStack, roles: dict[str, str]) -> tuple[Client, dict[str, Worker]]:
    """Start a scheduler and a worker of one thread for each name, with a resource for its role."""
    fleet: Any = await stack.enter_async_context(
        FleetScheduler(port=0, host="127.0.0.1", dashboard_address="127.0.0.1:0")
    )
    workers = {}
    for name, role in roles.items():
        worker: Any = Worker(
            fleet.address, name=name, nthreads=1, resources={role: 1}, dashboard_address=None
        )
        workers[name] = await stack.enter_async_context(worker)
    client: Any = Client(fleet.address, asynchronous=True)
    return await stack.enter_async_context(client), workers


def test_rollouts_are_spread_evenly_over_generators_alone() -> None:
    async def run() -> list[str]:
        async with AsyncExitStack() as stack:
            roles = {f"generator-{n}": "generator" for n in range(4)} | {"trainer-0": "trainer"}
            client, _ = await start(stack, roles)
            keys = [f"generator/{n}" for n in range(12)]
            tasks = client.map(
                executed_on, range(12), key=keys, resources={"generator": 1}, pure=False
            )
            return list(await client.gather(tasks))

    assert Counter(asyncio.run(run())) == {f"generator-{n}": 3 for n in range(4)}


def test_tasks_with_dependencies_run_where_these_are() -> None:
    async def run() -> list[str]:
        async with AsyncExitStack() as stack:
            client, _ = await start(stack, {f"reward-{n}": "reward" for n in range(3)})
            held = client.submit(executed_on, 0, workers="reward-2", pure=False)
            await held
            tasks = [
                client.submit(lambda _, n=n: executed_on(n), held, resources={"reward": 1})
                for n in range(2)
            ]
            return list(await client.gather(tasks))

    assert set(asyncio.run(run())) == {"reward-2"}


@pytest.mark.parametrize(("workers", "seconds"), [(3, 0.5), (64, 2.0), (300, 6.0), (512, 10.0)])
def test_all_workers_together_send_so_many_heartbeats(workers: int, seconds: float) -> None:
    assert heartbeat_interval_s(workers) == seconds


def test_only_generators_send_fewer_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_HEARTBEATS_PER_S", 0.25)

    async def run() -> dict[str, float]:
        async with AsyncExitStack() as stack:
            roles = {"generator-0": "generator", "trainer-0": "trainer"}
            _, workers = await start(stack, roles)
            for worker in workers.values():
                await worker.heartbeat()
            calls = {name: worker.periodic_callbacks for name, worker in workers.items()}
            return {name: each["heartbeat"].callback_time / 1e3 for name, each in calls.items()}

    assert asyncio.run(run()) == {"generator-0": 8.0, "trainer-0": 0.5}
