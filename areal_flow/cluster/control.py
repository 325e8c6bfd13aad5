"""The state of a running pool, and requests of another process to list, add and remove workers.

Requests go to the run's scheduler, which is part of the driver. The driver starts the workers
itself, so no worker outlives it. A request needs the run's certificate, like any other connection.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from distributed.core import rpc

from areal_flow.cluster.certificates import connection_security
from areal_flow.cluster.pool import WorkerPool, join_timeout_s
from areal_flow.cluster.registry import WorkerRecord
from areal_flow.cluster.worker import ENGINE_METRIC, SERVED_METRIC
from areal_flow.config.cluster import NetworkSettings
from areal_flow.core.errors import RunError
from areal_flow.core.pass_rates import HELD_OUT
from areal_flow.log.ledger_row import REWARD_TASKS, SYSTEM_AREA

HANDLER = "areal_flow_workers"


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A row of `areal-flow workers list`."""

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


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """A pool at one moment, from the scheduler's memory and the workers' last heartbeats."""

    workers: list[WorkerStatus]
    num_deaths: dict[str, int]
    """By role, of all workers so far."""
    engines: dict[str, Mapping[str, float]]
    """What the engine of each generator reports, by worker; empty for other roles."""
    reward_tasks: dict[str, tuple[int, float]]
    """By purpose: the number of tasks that hold results now, and the seconds of all so far."""
    processes: list[tuple[str, Mapping[str, Any]]]
    """The role and the last heartbeat of each process, the driver's included."""

    @classmethod
    def of(cls, pool: WorkerPool) -> PoolSnapshot:
        scheduler, records = pool.scheduler, pool.registry.all()
        deaths = Counter({record.role: 0 for record in records})
        for record in records:
            deaths[record.role] += len(record.deaths)
        roles = {record.address: record.role for record in records}
        beats = {address: worker.metrics for address, worker in scheduler.workers.items()}
        prefixes = [(p.name.partition("/"), p) for p in scheduler.task_prefixes.values()]
        return cls(
            workers=[
                _status(record, pool)
                for record in records
                if record.address or record.is_wanted or record.is_quarantined
            ],
            num_deaths=dict(deaths),
            engines={
                str(worker.name): worker.metrics.get(ENGINE_METRIC) or {}
                for worker in scheduler.workers.values()
            },
            reward_tasks={
                task: (prefix.state_counts["memory"], prefix.all_durations["compute"])
                for (role, _, task), prefix in prefixes
                if role == "reward"
            },
            processes=[
                *((roles[address], beat) for address, beat in beats.items() if address in roles),
                ("driver", scheduler.monitor.recent()),
            ],
        )

    def usage(self) -> dict[str, float]:
        """Return the resource usage of the run's processes, as metrics of a step's row."""
        reward_s = sum(
            seconds for task, (_, seconds) in self.reward_tasks.items() if task != HELD_OUT
        )
        return {**usage_by_role(self.processes), REWARD_TASKS: reward_s}


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


def usage_by_role(processes: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, float]:
    """Return sums over the processes of each role; 100% is one core, or one GPU.

    Args:
        processes: the role of each, and its last heartbeat as Dask has it: `cpu` in percent,
            `memory` in bytes, and where NVML is installed `gpu`.
    """
    metrics: Counter[str] = Counter()
    for role, beat in processes:
        used = {"cpu_utilization_percentage": beat.get("cpu", 0.0)}
        used["memory_usage_megabytes"] = beat.get("memory", 0) / 1e6
        if device := beat.get("gpu"):
            used["gpu_utilization_percentage"] = device["utilization"]
            used["gpu_memory_usage_megabytes"] = device["memory-used"] / 1e6
        metrics.update({f"{SYSTEM_AREA}{role}_{name}": value for name, value in used.items()})
    return dict(metrics)


def serve_pool(pool: WorkerPool) -> None:
    """Let other processes list, add and remove workers through the scheduler."""

    async def handle(request: str, **arguments: Any) -> Any:
        if request == "list":
            return [asdict(status) for status in PoolSnapshot.of(pool).workers]
        if request == "add":
            return await pool.add(arguments["role"], arguments["num_workers"])
        return await pool.remove(arguments["name"])

    pool.scheduler.handlers[HANDLER] = handle


async def list_workers(scheduler: str, network: NetworkSettings) -> list[WorkerStatus]:
    return [WorkerStatus(**row) for row in await _request(scheduler, network, "list", timeout_s=15)]


async def add_workers(
    scheduler: str, role: str, num_workers: int, network: NetworkSettings
) -> list[str]:
    arguments = {"role": role, "num_workers": num_workers}
    timeout_s = 60 + join_timeout_s(num_workers)
    return list(await _request(scheduler, network, "add", timeout_s=timeout_s, **arguments))


async def remove_worker(scheduler: str, name: str, network: NetworkSettings) -> None:
    await _request(scheduler, network, "remove", timeout_s=90, name=name)


async def _request(
    scheduler: str, network: NetworkSettings, request: str, *, timeout_s: float, **arguments: Any
) -> Any:
    security = connection_security(network).get_connection_args("client")
    try:
        async with rpc(scheduler, timeout=10, connection_args=security) as remote:
            response = getattr(remote, HANDLER)(request=request, **arguments)
            return await asyncio.wait_for(response, timeout_s)
    except OSError as error:  # TimeoutError included
        raise RunError(
            f"the driver does not answer at {scheduler} ({error or type(error).__name__}): it has "
            "ended or is suspended"
        ) from None
