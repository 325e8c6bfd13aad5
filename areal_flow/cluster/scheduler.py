"""The scheduler of Dask, in the driver's process."""

from __future__ import annotations

from typing import Any

from distributed import Scheduler, Security
from distributed.scheduler import (
    DEFAULT_EXTENSIONS,
    TaskState,
    WorkerState,
    heartbeat_interval,
)

from areal_flow.cluster.worker import DASHBOARD_HOST, used_extensions
from areal_flow.config.cluster import ClusterSettings
from areal_flow.core.errors import ConfigError

MAX_HEARTBEATS_PER_S, RARE_HEARTBEAT_S = 50, 10.0
"""Of all workers, since one takes a millisecond of the driver's processor time; and how long that
may make a generator wait before its next."""


def heartbeat_interval_s(num_workers: int) -> float:
    """Return how often a generator sends a heartbeat; by Dask, all would send 200 in a second."""
    rare_s = min(num_workers / MAX_HEARTBEATS_PER_S, RARE_HEARTBEAT_S)
    return max(float(heartbeat_interval(num_workers)), rare_s)


class FleetScheduler(Scheduler):
    """Serves hundreds of generators at less cost for each."""

    def heartbeat_worker(self, *, address: str, **options: Any) -> dict[str, Any]:
        """Ask generators for fewer heartbeats; those of trainer ranks say how far a step is."""
        reply: dict[str, Any] = super().heartbeat_worker(address=address, **options)
        worker = self.workers.get(address)
        if worker is not None and "generator" in worker.resources:
            reply["heartbeat-interval"] = heartbeat_interval_s(len(self.workers))
        return reply

    def worker_objective(self, ts: TaskState, ws: WorkerState) -> tuple[float, int]:
        """Return what is least for the best worker.

        A task without dependencies has nothing to move. Rollouts, the only such tasks that have a
        choice, take equally long as far as anybody knows: so their number says what durations do,
        and to add up those of 512 generators took a fifth of the driver's processor time.
        """
        if ts.dependencies:
            by_seconds: tuple[float, int] = super().worker_objective(ts, ws)
            return by_seconds
        return len(ws.processing) / ws.nthreads, ws.nbytes


async def listening_scheduler(settings: ClusterSettings, security: Security) -> Scheduler:
    """Start the scheduler of a cluster, in this process.

    It listens to workers on the network, and to the driver's own client in this process, which need
    not encrypt or copy what it sends (`address_in_process`).
    """
    scheduler = FleetScheduler(
        host=settings.network.host,
        port=0,
        dashboard_address=f"{DASHBOARD_HOST}:{settings.dashboard_port}",
        security=security,
        extensions=used_extensions(DEFAULT_EXTENSIONS),
    )
    try:
        await scheduler
        await scheduler.listen("inproc://")
        return scheduler
    except Exception as error:
        raise ConfigError(
            f"cluster.network.host = {settings.network.host!r}: the scheduler cannot listen there "
            f"({error.__cause__ or error}); use an address of this machine, and certificates and "
            "a key that belong together"
        ) from error


def address_in_process(scheduler: Scheduler) -> str:
    """Return where a client of this process finds a listening scheduler."""
    return str(scheduler.listeners[-1].contact_address)
