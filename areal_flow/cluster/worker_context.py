"""Gives every worker a context, empty at first, for the parts that its role needs.

`setup` only makes the context: a slow `setup` would outlast the worker's time to live and be
repeated for ever, and one that raises is merely logged. Tasks fill the context, and check it,
before they use it. `teardown` closes the parts. Dask gives the plugin to every worker that starts
or joins, which serves elasticity and recovery alike.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from inspect import isawaitable
from pathlib import Path
from typing import Any, TypeVar

from distributed import Worker, WorkerPlugin, get_worker

logger = logging.getLogger(__name__)

PLUGIN_NAME = "areal-flow"
VERSION_METRIC = "areal_flow_policy_version"

Part = TypeVar("Part")


class WorkerContext:
    """A worker's parts by kind, each made once, on first use, by whichever task comes first."""

    def __init__(self, run_directory: Path, writer_epoch: int, worker_name: str) -> None:
        self.run_directory = run_directory
        self.writer_epoch = writer_epoch
        self.worker_name = worker_name
        self._parts: dict[type, Any] = {}
        self._making = threading.Lock()

    def get(self, kind: type[Part]) -> Part | None:
        """Return the part of this kind, if it was made."""
        return self._parts.get(kind)

    def ensure(self, kind: type[Part], make: Callable[[], Part]) -> Part:
        """Return the part, making it first if need be; other threads meanwhile wait."""
        with self._making:
            if kind not in self._parts:
                self._parts[kind] = make()
            return self._parts[kind]  # type: ignore[no-any-return]

    def policy_version(self) -> int | None:
        """Return the version that this worker serves, if it serves one."""
        versions = (getattr(part, "policy_version", None) for part in list(self._parts.values()))
        return next((version for version in versions if version is not None), None)

    def drop(self, kind: type) -> None:
        """Forget a part that is no longer needed."""
        self._parts.pop(kind, None)

    async def close(self) -> None:
        """Close every part that can be closed; one that fails does not keep the others open."""
        for kind in list(self._parts):
            part = self._parts.pop(kind)
            try:
                closing = part.close() if hasattr(part, "close") else None
                if isawaitable(closing):
                    await closing
            except Exception:
                logger.exception("%s could not be closed", kind.__name__)


class RunPlugin(WorkerPlugin):
    """Gives every worker its holder."""

    name = PLUGIN_NAME

    def __init__(self, run_directory: Path, writer_epoch: int) -> None:
        self.run_directory = run_directory
        self.writer_epoch = writer_epoch
        self.holder: WorkerContext | None = None

    def setup(self, worker: Worker) -> None:
        self.holder = WorkerContext(self.run_directory, self.writer_epoch, str(worker.name))
        worker.metrics[VERSION_METRIC] = self._policy_version

    async def teardown(self, worker: Worker) -> None:
        """Close the parts of a worker that ends, or that another run's plugin takes over."""
        worker.metrics.pop(VERSION_METRIC, None)
        if self.holder:
            await self.holder.close()

    def _policy_version(self, worker: Worker) -> int | None:
        """Return the version that this worker serves: every heartbeat carries it."""
        return self.holder.policy_version() if self.holder else None


def holder(worker: Worker | None = None) -> WorkerContext:
    """Return the holder of the worker of this task; `client.run` passes the worker itself."""
    plugin = (worker or get_worker()).plugins[PLUGIN_NAME]
    assert isinstance(plugin, RunPlugin)
    assert plugin.holder is not None
    return plugin.holder
