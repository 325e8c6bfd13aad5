"""A worker's part of its run: the run's settings, and what the worker's role needs.

The context is a Dask plugin, so every worker that starts or joins has one. `setup` does little,
because Dask repeats a slow one and only logs one that raises. Tasks make the parts on first use,
and `teardown` closes them.
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

from areal_flow.cluster.liveness import STEP_METRIC, StepClock, StepProgress
from areal_flow.cluster.registry import Execution, Executions
from areal_flow.config import Recipe, load_recipe
from areal_flow.core.layout import RunLayout
from areal_flow.policy.tokenizer.directory import tokenizer_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

PLUGIN_NAME = "areal-flow"
EXECUTIONS = "executions"
"""The folder of `Executions`, within that of the processes."""
SERVED_METRIC = "areal_flow_served_weights"
ENGINE_METRIC = "areal_flow_engine"

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
