"""Starts worker processes on this machine, as children of the driver."""

from __future__ import annotations

import os
import sys
import sysconfig

from areal_flow.cluster.launchers.children import ChildLauncher
from areal_flow.cluster.placement import PROCESS_ENVIRONMENT, WorkerPlacement
from areal_flow.cluster.settings import ClusterSettings
from areal_flow.cluster.worker_process import worker_arguments


class LocalLauncher(ChildLauncher):
    """Workers that end with the driver, however the driver ends: the kernel kills them."""

    def __init__(self, scheduler: str, settings: ClusterSettings) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._network = settings.network

    def command(self, placement: WorkerPlacement) -> list[str]:
        arguments = worker_arguments(placement, self._scheduler, self._network)
        return [sys.executable, *arguments, str(os.getpid())]

    def environment(self, placement: WorkerPlacement) -> dict[str, str]:
        paths = {"PYTHONPATH": os.pathsep.join(import_paths())}
        return os.environ | PROCESS_ENVIRONMENT | placement.environment | paths


def import_paths() -> list[str]:
    """Return what the driver added to Python's own search path: workers import the same modules."""
    own = set(sysconfig.get_paths().values())
    library = sysconfig.get_path("stdlib")
    added = [path or os.getcwd() for path in sys.path]  # noqa: PTH109 (a search path is text)
    return [
        path
        for path in added
        if path not in own and not path.startswith(library) and not path.endswith(".zip")
    ]
