"""The program of a worker process: one Dask worker, which ends with the process that started it."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import platform
import signal
import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import Any

import dask
from distributed import Worker
from distributed.comm import get_address_host
from distributed.utils import get_ip
from distributed.worker import DEFAULT_EXTENSIONS

from areal_flow.cluster.certificates import connection_security
from areal_flow.cluster.placement import WorkerPlacement
from areal_flow.config.cluster import NetworkSettings
from areal_flow.core.code_version import VERSION
from areal_flow.core.machine import is_linux, raise_open_files_limit
from areal_flow.core.settings import search_here_last

DASK_SETTINGS: dict[str, Any] = {
    "distributed.scheduler.worker-ttl": None,  # see `liveness`
    "distributed.scheduler.allowed-failures": 3,
    "distributed.comm.timeouts.connect": "30 s",
    "distributed.worker.profile.enabled": False,
    "distributed.worker.http.routes": [],  # the driver has the numbers of all workers
    # Of the last messages to each worker, prompts included; 1,000 would be gigabytes.
    "distributed.admin.low-level-log-length": 10,
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.admin.system-monitor.interval": "2 s",
    "distributed.admin.tick.interval": "1 s",  # with 20 ms, an idle scheduler takes 1.4% of a core
}
"""Of the driver and of every worker process."""

UNUSED_EXTENSIONS = {"spans"}
"""Of Dask: this one keeps 3 KB for good each time that the scheduler gets work after a pause."""

DASHBOARD_HOST = "127.0.0.1"
"""Dask's pages have no authentication: reach them from elsewhere through a tunnel."""

CLOSE_TIMEOUT_S = 4.0
"""How long running tasks may take when the worker ends."""
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
VERSIONS = "areal_flow_versions"
"""What a worker registers with: its `software_versions`."""
EXCHANGED_BY = ("distributed", "pyarrow", "pylance", "torch", "transformers")
"""What processes exchange depends on the versions of these packages."""


def worker_options(placement: WorkerPlacement, scheduler: str, network: NetworkSettings) -> str:
    """Return the options of a worker as one line of JSON."""
    options = {
        "name": placement.name,
        "scheduler": scheduler,
        "num_threads": placement.num_threads,
        "resources": placement.resources,
        "network": network.model_dump_json(exclude_none=True),
    }
    return json.dumps(options)


@cache
def software_versions() -> dict[str, str]:
    """Return the versions that all processes of a run must have in common."""
    python = platform.python_version().rpartition(".")[0]
    # torch's are as 2.13.0+cpu and 2.13.0+cu130, which go together.
    packages = {name: metadata.version(name).partition("+")[0] for name in EXCHANGED_BY}
    return {"areal-flow": VERSION, "Python": python, **packages}


def main(options: str, parent: str) -> None:
    """Run a worker until it is stopped or its scheduler ends.

    Args:
        options: of `worker_options`.
        parent: the number of the process that started this one.
    """
    end_with_parent(int(parent))
    work(options)


def work(options: str) -> None:
    """Run a worker in this process, which gets its name where `ps` and `top` show it."""
    chosen = json.loads(options)
    search_here_last()
    if is_linux():
        ctypes.CDLL(None).prctl(PR_SET_NAME, chosen["name"].encode())
    raise_open_files_limit()  # workers fetch from each other
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    asyncio.run(_work(**chosen))


async def _work(**options: Any) -> None:
    closing: list[asyncio.Task[Any]] = []

    def close() -> None:
        closing.append(asyncio.ensure_future(worker.close(timeout=CLOSE_TIMEOUT_S)))

    with dask.config.set(DASK_SETTINGS):
        worker = await make_worker(**options)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, close)
        await worker.finished()
        await asyncio.gather(*closing)
    sys.stderr.flush()
    os._exit(0)  # a thread in a long call would hold up a regular exit


def make_worker(
    name: str, scheduler: str, num_threads: int, resources: dict[str, int], network: str
) -> Worker:
    """Return a worker with these `worker_options`, which joins its scheduler when awaited."""
    return Worker(
        scheduler,
        name=name,
        nthreads=num_threads,
        resources=resources,
        security=connection_security(NetworkSettings.model_validate_json(network)),
        host=get_ip(get_address_host(scheduler)),  # nothing listens elsewhere
        memory_limit=0,
        dashboard_address=f"{DASHBOARD_HOST}:0",  # Dask listens, though there are no pages
        startup_information={VERSIONS: _own_versions},
        extensions=used_extensions(DEFAULT_EXTENSIONS),
    )


def used_extensions(default: Mapping[str, Any]) -> dict[str, Any]:
    """Return Dask's extensions of a scheduler or a worker; both must have the same."""
    return {name: default[name] for name in default.keys() - UNUSED_EXTENSIONS}


async def _own_versions(worker: Worker) -> dict[str, str]:
    return software_versions()


def end_with_parent(parent: int) -> None:
    """Have Linux kill this process when its parent ends; elsewhere it ends with its scheduler."""
    if is_linux():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the kernel was asked
            sys.exit(f"expected the parent process {parent}, found {os.getppid()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
