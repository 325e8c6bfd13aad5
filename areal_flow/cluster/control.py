"""A running fleet from another process: its scheduler answers for it.

Requests go through the scheduler of the run, so that the driver starts every worker itself and
nothing outlives it. Whoever reaches that port may do anything anyhow: it listens on loopback only.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Any

from distributed.core import rpc

from areal_flow.cluster.failure_detector import SILENT_S
from areal_flow.cluster.health import Watch
from areal_flow.cluster.pool import Fleet
from areal_flow.cluster.registry import Member
from areal_flow.cluster.worker_context import VERSION_METRIC
from areal_flow.errors import RunError

HANDLER = "areal_flow_workers"


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
    num_running: int = 0
    num_assigned: int = 0
    silence_s: float = 0.0
    num_deaths: int = 0


def serve_fleet(fleet: Fleet, watch: Watch) -> None:
    """Have the scheduler answer `list_workers`, `add_workers` and `remove_worker`."""

    async def answer(request: str, **arguments: Any) -> Any:
        if request == "list":
            return [asdict(status) for status in fleet_status(fleet, watch)]
        if request == "add":
            return await fleet.add(arguments["role"], arguments["num_workers"])
        return await fleet.remove(arguments["name"])

    fleet.scheduler.handlers[HANDLER] = answer


def fleet_status(fleet: Fleet, watch: Watch) -> list[WorkerStatus]:
    """Return every worker that is there, starts or is quarantined."""
    shown = [m for m in fleet.members.all() if m.address or m.is_expected or m.is_quarantined]
    return [_status(member, fleet, watch) for member in shown]


def _status(member: Member, fleet: Fleet, watch: Watch) -> WorkerStatus:
    worker = fleet.scheduler.workers.get(member.address)
    num_deaths = len(member.deaths)
    if worker is None:
        state = "quarantined" if member.is_quarantined else "starting"
        return WorkerStatus(member.name, member.role, state, num_deaths=num_deaths)
    silence_s = watch.silence_s(member.address)
    return WorkerStatus(
        name=member.name,
        role=member.role,
        state=_state(member, silence_s),
        pid=worker.pid,
        address=member.address,
        num_slots=member.num_slots,
        policy_version=worker.metrics.get(VERSION_METRIC),
        num_running=worker.metrics["task_counts"].get("executing", 0),
        num_assigned=len(worker.processing),
        silence_s=silence_s,
        num_deaths=num_deaths,
    )


def _state(member: Member, silence_s: float) -> str:
    if member.is_leaving:
        return "leaving"
    return "silent" if silence_s > SILENT_S else "live"


async def list_workers(scheduler: str) -> list[WorkerStatus]:
    """Return the workers of the run whose scheduler this is."""
    return [WorkerStatus(**row) for row in await _ask(scheduler, "list", within_s=15)]


async def add_workers(scheduler: str, role: str, num_workers: int) -> list[str]:
    """Start workers; return their names once they have joined."""
    names: list[str] = await _ask(
        scheduler, "add", within_s=180, role=role, num_workers=num_workers
    )
    return names


async def remove_worker(scheduler: str, name: str) -> None:
    """Retire a worker; return once it is gone."""
    await _ask(scheduler, "remove", within_s=90, name=name)


async def _ask(scheduler: str, request: str, *, within_s: float, **arguments: Any) -> Any:
    """Ask the driver.

    Raises:
        RunError: nobody answers there.
        ArealFlowError: what the driver said.
    """
    try:
        async with rpc(scheduler, timeout=10) as remote:
            answer = getattr(remote, HANDLER)(request=request, **arguments)
            return await asyncio.wait_for(answer, within_s)
    except OSError as error:  # of which TimeoutError is one
        raise RunError(
            f"the driver does not answer at {scheduler} ({error or type(error).__name__}): it is "
            "stopped, or has just ended"
        ) from None
