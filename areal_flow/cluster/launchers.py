"""Worker placements in, a running local cluster and its client out. Loopback only."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import dask
from distributed import Client, Scheduler, SpecCluster

from areal_flow.cluster.control import serve_pool
from areal_flow.cluster.health import HealthMonitor
from areal_flow.cluster.nanny import HOST
from areal_flow.cluster.placement import PROCESS_ENVIRONMENT, WorkerPlacement
from areal_flow.cluster.pool import CONNECT_TIMEOUT, PoolPlugin, WorkerPool
from areal_flow.cluster.worker_context import RunPlugin
from areal_flow.config import ClusterSettings
from areal_flow.errors import ConfigError

START_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A client, the workers, who looks after them, and where to watch."""

    client: Client
    pool: WorkerPool
    watch: HealthMonitor
    scheduler: str
    dashboard: str


@asynccontextmanager
async def local_cluster(
    placements: Sequence[WorkerPlacement], settings: ClusterSettings, plugin: RunPlugin
) -> AsyncIterator[RunningCluster]:
    """Start one process a placement, wait for all, and end them all on the way out.

    Raises:
        ConfigError: the dashboard's port is taken.
    """
    _refuse_busy_port(settings.dashboard_port)
    _quieten_dask()
    pool = WorkerPool(placements)
    watch = HealthMonitor(pool, settings)
    with dask.config.set(_dask_settings()):
        async with (
            SpecCluster(
                scheduler={
                    "cls": Scheduler,
                    "options": {
                        "host": HOST,
                        "port": 0,
                        "dashboard_address": f"{HOST}:{settings.dashboard_port}",
                        "plugins": (PoolPlugin(pool),),
                    },
                },
                workers=pool.specification(),
                asynchronous=True,
                silence_logs=False,
            ) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            pool.attach(cluster)
            serve_pool(pool, watch)
            await client.wait_for_workers(len(placements), timeout=START_TIMEOUT_S)
            await client.register_plugin(plugin)
            async with watch.watching():
                try:
                    yield RunningCluster(
                        client, pool, watch, cluster.scheduler_address, cluster.dashboard_link
                    )
                finally:
                    pool.close()


def _dask_settings() -> dict[str, object]:
    return {
        "distributed.worker.daemon": False,
        "distributed.nanny.pre-spawn-environ": PROCESS_ENVIRONMENT,
        "distributed.scheduler.worker-ttl": None,  # see `watch`
        "distributed.deploy.lost-worker-timeout": "1 day",  # or slow restarts would be the last
        CONNECT_TIMEOUT: "30 s",  # `WorkerPool.scheduler_ends` makes it short
        "distributed.scheduler.allowed-failures": 3,
        "distributed.worker.profile.enabled": False,
        "distributed.admin.system-monitor.gil.enabled": False,
    }


def _quieten_dask() -> None:
    """Dask gives its loggers levels of their own at import; failures reach us anyway."""
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in ("distributed", "bokeh", "tornado"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _refuse_busy_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ConfigError(
                f"cluster.dashboard_port = {port}: the port cannot be used ({error.strerror}); "
                "choose another, or 0 for any that is free"
            ) from None
