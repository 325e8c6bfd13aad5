"""A worker: the program of its process, and its part of the run.

The process is one Dask worker, which ends with the process that started it. `WorkerContext` has the
run's settings, and what the worker's role needs. It is a Dask plugin, so every worker that starts
or joins has one. `setup` does little, because Dask repeats a slow one and only logs one that
raises. Tasks make the parts on first use, and `teardown` closes them.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache, cached_property
from importlib import import_module, metadata
from inspect import isawaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import dask
import pyarrow as pa
from distributed import Worker, WorkerPlugin, get_worker
from distributed.comm import get_address_host
from distributed.utils import get_ip
from distributed.worker import DEFAULT_EXTENSIONS

from areal_flow.cluster.certificates import connection_security
from areal_flow.cluster.liveness import STEP_METRIC, StepClock, StepProgress
from areal_flow.cluster.placement import WorkerPlacement
from areal_flow.cluster.registry import Execution, Executions
from areal_flow.cluster.sandbox_service import OPERATION, SandboxService
from areal_flow.config import Recipe, load_recipe
from areal_flow.config.cluster import NetworkSettings
from areal_flow.core.layout import RunLayout
from areal_flow.core.machine import is_linux, raise_open_files_limit
from areal_flow.core.program import VERSION
from areal_flow.core.settings import search_here_last
from areal_flow.policy.tokenizer.directory import tokenizer_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

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

PLUGIN_NAME = "areal-flow"
EXECUTIONS = "executions"
"""The folder of `Executions`, within that of the processes."""
SERVED_METRIC = "areal_flow_served_weights"
ENGINE_METRIC = "areal_flow_engine"

Part = TypeVar("Part")


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


class WorkerContext(WorkerPlugin):
    """A worker's parts by kind, each made once, on first use, by whichever task comes first."""

    name = PLUGIN_NAME

    def __init__(self, run_directory: Path, writer_epoch: int) -> None:
        self.layout = RunLayout(run_directory)
        self.writer_epoch = writer_epoch
        self.worker_name = ""
        self.host = "127.0.0.1"

    @cached_property
    def executions(self) -> Executions:
        return Executions(self.layout.processes_of(self.writer_epoch) / EXECUTIONS)

    @cached_property
    def recipe(self) -> Recipe:
        return load_recipe(self.layout.config)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.layout.model)

    def setup(self, worker: Worker) -> None:
        """Prepare the process for its first task.

        The process leaves its group, to which a terminal sends Ctrl-C: the driver ends the workers
        once their step is done. To ignore the signal is not enough, since polars listens for it.
        """
        self.worker_name = str(worker.name)
        self.host = worker.ip
        self._process = worker.id if "reward" in worker.state.total_resources else ""
        if self._process:
            worker.handlers[OPERATION] = SandboxService().serve
        self._executes = Execution()
        self._parts: dict[type, Any] = {}
        self._step_clock = StepClock()
        self._making = threading.Lock()
        worker.metrics[SERVED_METRIC] = self._served_weights
        worker.metrics[ENGINE_METRIC] = self._engine_state
        worker.metrics[STEP_METRIC] = self._step_progress
        _align_received_tables()
        if os.getpgrp() != os.getpid():
            os.setpgrp()

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        """Record the task that a reward worker begins or ends; it has one slot."""
        if not self._process:
            return
        now = self._executes
        if (start, finish) == ("constrained", "executing"):
            self._executes = Execution(str(key), now.num_ended)
        elif start == "executing" and key == now.key:
            self._executes = Execution("", now.num_ended + 1)
        if self._executes is not now:
            self.executions.note(self._process, self._executes)

    async def teardown(self, worker: Worker) -> None:
        """Close all parts of a worker that ends or that serves another run now."""
        for name in (SERVED_METRIC, ENGINE_METRIC, STEP_METRIC):
            worker.metrics.pop(name, None)
        for kind in list(self._parts):
            part = self._parts.pop(kind)
            try:
                closing = part.close() if hasattr(part, "close") else None
                if isawaitable(closing):
                    await closing
            except Exception:
                logger.exception("%s could not be closed", kind.__name__)

    def get(self, kind: type[Part]) -> Part | None:
        return self._parts.get(kind)

    def ensure(self, kind: type[Part], make: Callable[[], Part]) -> Part:
        """Return the part; make it on first use, in one thread."""
        with self._making:
            if kind not in self._parts:
                self._parts[kind] = make()
            return self._parts[kind]  # type: ignore[no-any-return]

    def drop(self, kind: type) -> None:
        self._parts.pop(kind, None)

    def _served_weights(self, worker: Worker) -> dict[str, Any] | None:
        """Return the `ServedWeights` of this worker, for its heartbeats."""
        served_by_part = (getattr(part, "served", None) for part in list(self._parts.values()))
        return next((asdict(served) for served in served_by_part if served is not None), None)

    def _engine_state(self, worker: Worker) -> dict[str, float]:
        readers = (getattr(part, "engine_state", None) for part in list(self._parts.values()))
        return next((state() for state in readers if state is not None), {})

    def _step_progress(self, worker: Worker) -> StepProgress | None:
        groups = (getattr(part, "replicas", None) for part in list(self._parts.values()))
        return next((self._step_clock.look(each) for each in groups if each is not None), None)


def worker_context(worker: Worker | None = None) -> WorkerContext:
    """Return the context of the worker of this task; `client.run` passes the worker itself."""
    context = (worker or get_worker()).plugins[PLUGIN_NAME]
    assert isinstance(context, WorkerContext)
    return context


def _align_received_tables() -> None:
    """Align the buffers of received Arrow tables: Lance panics (a `BaseException`) otherwise."""
    from distributed.protocol.serialize import dask_deserialize

    import_module("distributed.protocol.arrow")  # so that ours is registered after it

    @dask_deserialize.register(pa.Table)
    def aligned_table(header: dict[str, Any], frames: list[Any]) -> pa.Table:
        options = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.DataTypeSpecific)
        with pa.ipc.open_stream(pa.BufferReader(frames[0]), options=options) as reader:
            return reader.read_all()


if __name__ == "__main__":
    main(*sys.argv[1:])
