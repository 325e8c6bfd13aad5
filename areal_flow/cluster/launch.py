"""Starts the cluster of a run: a scheduler in the driver's process, its workers and a client."""

from __future__ import annotations

import gc
import logging
import shutil
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import dask
from distributed import Client
from prometheus_client import REGISTRY

from areal_flow.cluster.certificates import (
    check_certificates,
    connection_security,
    with_certificates,
)
from areal_flow.cluster.control import serve_pool
from areal_flow.cluster.launchers import make_launcher
from areal_flow.cluster.launchers.fork_server import ForkServer
from areal_flow.cluster.launchers.queued import QueuedLauncher
from areal_flow.cluster.liveness import watch_health
from areal_flow.cluster.monitoring import RunMetrics
from areal_flow.cluster.open_files import allow_open_files
from areal_flow.cluster.placement import WorkerPlacement, machines_of, place_workers
from areal_flow.cluster.pool import WorkerPool
from areal_flow.cluster.registry import Executions
from areal_flow.cluster.rl_page import PAGE, RunFeed, add_page
from areal_flow.cluster.scheduler import address_in_process, listening_scheduler
from areal_flow.cluster.worker import DASHBOARD_HOST, DASK_SETTINGS, EXECUTIONS, WorkerContext
from areal_flow.config import Recipe
from areal_flow.config.cluster import ClusterSettings, NetworkSettings
from areal_flow.core.errors import ConfigError
from areal_flow.core.machine import raise_open_files_limit
from areal_flow.flow.costs import record_worker_event
from areal_flow.flow.flow import Flow
from areal_flow.planning.gpus import gpu_named


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A client, the workers, and the addresses of scheduler and dashboard."""

    client: Client
    pool: WorkerPool
    scheduler: str
    dashboard: str
    network: NetworkSettings
    feed: RunFeed
    metrics: RunMetrics

    async def show(self, flow: Flow) -> None:
        """Show a flow on the dashboard's page and to Prometheus from now on."""
        self.feed.flow = flow
        await self.metrics.follow(flow)


def check_cluster(recipe: Recipe) -> None:
    """Refuse settings with which no cluster can start."""
    _refuse_busy_port(recipe.cluster.dashboard_port)
    launcher = make_launcher("", recipe.cluster)
    num_workers = len(place_workers(recipe)) + recipe.cluster.num_addable_generators
    allow_open_files(num_workers, files_per_worker=launcher.files_per_worker)
    if isinstance(launcher, QueuedLauncher) and shutil.which(launcher.program) is None:
        raise ConfigError(
            f"cluster.launcher = {recipe.cluster.launcher!r}: there is no {launcher.program}; "
            "start the driver where jobs are submitted"
        )
    check_certificates(recipe.cluster.network)
    if recipe.cluster.autoscale_gpu:
        gpu_named(recipe.cluster.autoscale_gpu)


@asynccontextmanager
async def launch_cluster(
    placements: Sequence[WorkerPlacement],
    settings: ClusterSettings,
    context: WorkerContext,
    fork_server: ForkServer | None = None,
) -> AsyncIterator[RunningCluster]:
    """Start a process for each placement, wait until there are enough, and end them on exit."""
    _refuse_busy_port(settings.dashboard_port)
    raise_open_files_limit()  # the scheduler keeps half as many connections
    with (
        dask.config.set(DASK_SETTINGS),
        _quiet_dask(),
        _folder_of(context) as folder,
    ):
        network = with_certificates(settings.network, folder)
        settings = settings.model_copy(update={"network": network})
        security = connection_security(network)
        async with await listening_scheduler(settings, security) as scheduler:
            launcher = make_launcher(
                scheduler.address, settings, fork_server, logs=context.layout.jobs
            )
            executions = Executions(folder / EXECUTIONS)
            pool = WorkerPool(scheduler, launcher, machines_of(settings), executions)
            pool.note = partial(record_worker_event, context.layout.workers, context.writer_epoch)
            feed = RunFeed(context.layout, pool)
            add_page(scheduler, feed)
            serve_pool(pool)
            REGISTRY.register(metrics := RunMetrics(context.layout, pool))
            try:
                address = scheduler.address
                own = address_in_process(scheduler)
                async with Client(own, asynchronous=True, security=security) as client:
                    # First: then each worker gets it as it joins. To send it to hundreds at once
                    # would take a connection to each, and fail with the first that is lost.
                    await client.register_plugin(context)
                    await pool.start_until_joined(
                        placements, min_generators=settings.min_generators
                    )
                    pool.spawn(watch_health(pool, settings))
                    dashboard = f"http://{DASHBOARD_HOST}:{scheduler.http_server.port}/{PAGE}"
                    with _quick_garbage_collections():
                        yield RunningCluster(
                            client, pool, address, dashboard, network, feed, metrics
                        )
            finally:
                REGISTRY.unregister(metrics)
                await pool.stop()


@contextmanager
def _folder_of(context: WorkerContext) -> Iterator[Path]:
    """Make the folder that the processes share and only this user reads; remove it on exit."""
    folder = context.layout.processes_of(context.writer_epoch)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / EXECUTIONS).mkdir(exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _quick_garbage_collections() -> Iterator[None]:
    """Exclude loaded modules from garbage collection, a tenth of the scheduler's time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _quiet_dask() -> Iterator[None]:
    """Silence Dask's loggers, which set their levels at import; failures raise errors anyway."""
    quiet = {"distributed", "bokeh", "tornado"}
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] in quiet]
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _refuse_busy_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((DASHBOARD_HOST, port))
        except OSError as error:
            raise ConfigError(
                f"cluster.dashboard_port = {port}: the port cannot be used ({error.strerror}); "
                "choose another, or 0 for any that is free"
            ) from None
