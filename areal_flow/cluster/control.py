"""Lists, adds and removes a running pool's workers from another process.

Requests go through the run's scheduler, so that the driver starts every worker and none outlives
it. They need the scheduler's certificate, like any other connection.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from typing import Any

from distributed.core import rpc

from areal_flow.cluster.certificates import connection_security
from areal_flow.cluster.placement import WorkerPlacement, place_beside
from areal_flow.cluster.pool import WorkerPool
from areal_flow.cluster.registry import WorkerRecord
from areal_flow.cluster.worker_context import SERVED_METRIC
from areal_flow.config.cluster import NetworkSettings
from areal_flow.core.errors import EngineError, RunError

HANDLER = "areal_flow_workers"
ELASTIC_ROLES = ("generator", "reward")


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker, as a table's row."""

    name: str
    role: str
    state: str
    pid: int = 0
    address: str = ""
    num_slots: int = 0
    policy_version: int | None = None
    served_hash: str = ""
    transfer_s: float | None = None
    stall_s: float | None = None
    num_running: int = 0
    num_assigned: int = 0
    silence_s: float = 0.0
    num_deaths: int = 0


def serve_pool(pool: WorkerPool) -> None:
    async def answer(request: str, **arguments: Any) -> Any:
        if request == "list":
            return [asdict(status) for status in pool_status(pool)]
        if request == "add":
            return await add_to(pool, arguments["role"], arguments["num_workers"])
        return await remove_from(pool, arguments["name"])

    pool.scheduler.handlers[HANDLER] = answer


def pool_status(pool: WorkerPool) -> list[WorkerStatus]:
    shown = [m for m in pool.registry.all() if m.address or m.is_wanted or m.is_quarantined]
    return [_status(record, pool) for record in shown]


def _status(record: WorkerRecord, pool: WorkerPool) -> WorkerStatus:
    worker = pool.scheduler.workers.get(record.address)
    num_deaths = len(record.deaths)
    if worker is None:
        state = "quarantined" if record.is_quarantined else "starting"
        return WorkerStatus(record.name, record.role, state, num_deaths=num_deaths)
    state = "silent" if record.is_silent else "live"
    return WorkerStatus(
        name=record.name,
        role=record.role,
        state="leaving" if record.is_leaving else state,
        pid=worker.pid,
        address=record.address,
        num_slots=record.placement.num_slots,
        **(worker.metrics.get(SERVED_METRIC) or {}),
        num_running=worker.metrics["task_counts"].get("executing", 0),
        num_assigned=len(worker.processing),
        silence_s=record.silence_s,
        num_deaths=num_deaths,
    )


async def add_to(pool: WorkerPool, role: str, num_workers: int) -> list[str]:
    """Start workers like the first of this role; return their names once they have joined."""
    if role not in ELASTIC_ROLES:
        raise RunError(f"expected a role of {', '.join(ELASTIC_ROLES)}, found {role!r}")
    if num_workers < 1:
        raise RunError(f"expected to add 1 worker or more, found {num_workers}")
    records = pool.registry.all()
    first = next(m.placement for m in records if m.role == role)
    placed = [m.placement for m in records if m.is_wanted or m.address]  # also a leaving one
    taken = {m.name for m in records}
    free_names = (name for index in count() if (name := f"{role}-{index}") not in taken)
    added: list[WorkerPlacement] = []
    for name in islice(free_names, num_workers):
        like = replace(first, name=name)
        added.append(place_beside(like, [*placed, *added], pool.machines))
    try:
        await pool.start_until_joined(added)
    except (EngineError, RunError):
        for placement in added:
            record = pool.registry.named(placement.name)
            if record is not None:
                await pool.retire(record)
        raise
    return [placement.name for placement in added]


async def remove_from(pool: WorkerPool, name: str, *, after_tasks: bool = False) -> None:
    """Retire a worker: its finished results move to others, its tasks run again elsewhere.

    Args:
        after_tasks: let it finish the tasks that it executes, however long they take.
    """
    record = pool.registry.named(name)
    if record is None:
        known = ", ".join(m.name for m in pool.registry.all() if m.is_wanted)
        raise RunError(f"expected the name of a worker, found {name!r}; there are: {known}")
    if record.role == "trainer":
        raise RunError(f"{name} trains and cannot be removed; stop the run instead")
    others = [m for m in pool.registry.present(record.role) if m is not record]
    if record.address and not others:
        raise RunError(
            f"{name} is the last {record.title} of this run and cannot be removed; add "
            "another first"
        )
    await pool.retire(record, after_tasks=after_tasks)


async def list_workers(scheduler: str, network: NetworkSettings) -> list[WorkerStatus]:
    return [WorkerStatus(**row) for row in await _ask(scheduler, network, "list", within_s=15)]


async def add_workers(
    scheduler: str, role: str, num_workers: int, network: NetworkSettings
) -> list[str]:
    request = {"role": role, "num_workers": num_workers}
    return list(await _ask(scheduler, network, "add", within_s=180, **request))


async def remove_worker(scheduler: str, name: str, network: NetworkSettings) -> None:
    await _ask(scheduler, network, "remove", within_s=90, name=name)


async def _ask(
    scheduler: str, network: NetworkSettings, request: str, *, within_s: float, **arguments: Any
) -> Any:
    security = connection_security(network).get_connection_args("client")
    try:
        async with rpc(scheduler, timeout=10, connection_args=security) as remote:
            answer = getattr(remote, HANDLER)(request=request, **arguments)
            return await asyncio.wait_for(answer, within_s)
    except OSError as error:  # of which TimeoutError is one
        raise RunError(
            f"the driver does not answer at {scheduler} ({error or type(error).__name__}): it is "
            "stopped, or has just ended"
        ) from None
