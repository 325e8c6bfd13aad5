"""What every worker carries: a holder, empty at first, for the one part that its role needs.

`setup` does no more than make the holder: a slow one would outlast the worker's time to live and
loop for ever, and one that raises is only logged. Tasks fill it, and check it, before they use it.
Dask gives the plugin to every worker that starts or joins: that is elasticity and recovery alike.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from distributed import Worker, WorkerPlugin, get_worker

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

    def _policy_version(self, worker: Worker) -> int | None:
        """Return the version that this worker serves: every heartbeat carries it."""
        return self.holder.policy_version() if self.holder else None


def holder(worker: Worker | None = None) -> WorkerContext:
    """Return the holder of the worker of this task; `client.run` passes the worker itself."""
    plugin = (worker or get_worker()).plugins[PLUGIN_NAME]
    assert isinstance(plugin, RunPlugin)
    assert plugin.holder is not None
    return plugin.holder
