"""What a worker has of its run: the run's settings, and the parts that its role needs.

Dask gives the context, as a plugin, to every worker that starts or joins, which serves elasticity
and recovery alike. `setup` only makes it ready: a slow `setup` would outlast the worker's time to
live and be repeated for ever, and one that raises is merely logged. Tasks fill the context, and
check it, before they use it. `teardown` closes the parts.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from importlib import import_module
from inspect import isawaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from distributed import Worker, WorkerPlugin, get_worker

from areal_flow.cluster.executions import Execution, Executions
from areal_flow.config import Recipe, load_recipe
from areal_flow.models.directory import tokenizer_of
from areal_flow.run.layout import RunLayout

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

PLUGIN_NAME = "areal-flow"
EXECUTIONS = "executions"
"""Where processes write down what they execute, in the folder that they share."""
SERVED_METRIC = "areal_flow_served_weights"

Part = TypeVar("Part")


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
        """The recipe that the run was started with."""
        return load_recipe(self.layout.config)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer_of(self.layout.model)

    def setup(self, worker: Worker) -> None:
        """Prepare the process for its first task.

        A Ctrl-C at a terminal reaches every process of its group, while it is the driver that ends
        the workers, once their step is done. To ignore the signal is not enough: polars listens for
        it during a query. So the process leaves the group.
        """
        self.worker_name = str(worker.name)
        self.host = worker.ip
        self._process = worker.id if "reward" in worker.state.total_resources else ""
        self._executes = Execution()
        self._parts: dict[type, Any] = {}
        self._making = threading.Lock()
        worker.metrics[SERVED_METRIC] = self._served_weights
        _align_received_tables()
        if os.getpgrp() != os.getpid():
            os.setpgrp()

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:
        """Write down which task a reward worker begins, and that it has ended: it has one slot."""
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
        """Close the parts of a worker that ends, or that another run's context takes over.

        One that cannot be closed does not keep the others open.
        """
        worker.metrics.pop(SERVED_METRIC, None)
        for kind in list(self._parts):
            part = self._parts.pop(kind)
            try:
                closing = part.close() if hasattr(part, "close") else None
                if isawaitable(closing):
                    await closing
            except Exception:
                logger.exception("%s could not be closed", kind.__name__)

    def get(self, kind: type[Part]) -> Part | None:
        """Return the part of this kind, if it was made."""
        return self._parts.get(kind)

    def ensure(self, kind: type[Part], make: Callable[[], Part]) -> Part:
        """Return the part, making it first if need be; other threads meanwhile wait."""
        with self._making:
            if kind not in self._parts:
                self._parts[kind] = make()
            return self._parts[kind]  # type: ignore[no-any-return]

    def drop(self, kind: type) -> None:
        """Forget a part that is no longer needed."""
        self._parts.pop(kind, None)

    def _served_weights(self, worker: Worker) -> dict[str, Any] | None:
        """Return what this worker serves, if anything: every heartbeat carries it."""
        found = (getattr(part, "served", None) for part in list(self._parts.values()))
        return next((asdict(served) for served in found if served is not None), None)


def worker_context(worker: Worker | None = None) -> WorkerContext:
    """Return the context of the worker of this task; `client.run` passes the worker itself."""
    context = (worker or get_worker()).plugins[PLUGIN_NAME]
    assert isinstance(context, WorkerContext)
    return context


def _align_received_tables() -> None:
    """Have Arrow tables that come over the network aligned on arrival, where that is needed.

    Their buffers start anywhere, and Lance panics on misaligned data (with a `PanicException`,
    which is a `BaseException`).
    """
    from distributed.protocol.serialize import dask_deserialize

    import_module("distributed.protocol.arrow")  # registers first, so that ours replaces it

    @dask_deserialize.register(pa.Table)
    def aligned_table(header: dict[str, Any], frames: list[Any]) -> pa.Table:
        options = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.DataTypeSpecific)
        with pa.ipc.open_stream(pa.BufferReader(frames[0]), options=options) as reader:
            return reader.read_all()
