"""Worker placements in, a running local cluster and its client out. Loopback only."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import dask
from distributed import Client, Nanny, Scheduler, SpecCluster

from areal_flow.cluster.placement import PROCESS_ENVIRONMENT, WorkerPlacement
from areal_flow.cluster.plugins import RunPlugin
from areal_flow.config import ClusterSettings
from areal_flow.errors import ConfigError

HOST = "127.0.0.1"
"""A scheduler's port is remote code execution: nothing listens beyond this machine."""

START_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A client and where to watch."""

    client: Client
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
    with dask.config.set(_dask_settings(settings)):
        async with (
            SpecCluster(
                scheduler={
                    "cls": Scheduler,
                    "options": {
                        "host": HOST,
                        "port": 0,
                        "dashboard_address": f"{HOST}:{settings.dashboard_port}",
                    },
                },
                workers={placement.name: _nanny(placement) for placement in placements},
                asynchronous=True,
                silence_logs=False,
            ) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            await client.wait_for_workers(len(placements), timeout=START_TIMEOUT_S)
            await client.register_plugin(plugin)
            yield RunningCluster(client, cluster.dashboard_link)


def _dask_settings(settings: ClusterSettings) -> dict[str, object]:
    return {
        "distributed.worker.daemon": False,
        "distributed.nanny.pre-spawn-environ": PROCESS_ENVIRONMENT,
        "distributed.scheduler.worker-ttl": f"{settings.worker_ttl_s} s",
        "distributed.scheduler.allowed-failures": 3,
        "distributed.worker.profile.enabled": False,
        "distributed.admin.system-monitor.gil.enabled": False,
    }


def _quieten_dask() -> None:
    """Dask gives its loggers levels of their own at import; failures reach us anyway."""
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in ("distributed", "bokeh", "tornado"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _nanny(placement: WorkerPlacement) -> dict[str, object]:
    return {
        "cls": Nanny,
        "options": {
            "nthreads": placement.num_threads,
            "resources": {placement.role: placement.num_slots},
            "env": placement.environment,
            "memory_limit": 0,
            "host": HOST,
            "dashboard": False,
            "preload": ["areal_flow.cluster.preload"],
        },
    }


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
