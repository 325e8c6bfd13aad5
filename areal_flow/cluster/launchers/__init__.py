"""Starts and ends the processes of placed workers; the pool decides which start again.

A new launcher is a file beside these, a line in `LAUNCHERS` and a case in
`tests/contracts/test_launchers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from areal_flow.cluster.launchers.fork_server import ForkServer
from areal_flow.cluster.launchers.kubernetes import KubernetesLauncher
from areal_flow.cluster.launchers.local import LocalLauncher
from areal_flow.cluster.launchers.remote import SrunLauncher, SshLauncher
from areal_flow.cluster.launchers.slurm import SlurmLauncher
from areal_flow.cluster.liveness import ProcessorUse
from areal_flow.cluster.placement import WorkerPlacement
from areal_flow.config.cluster import ClusterSettings
from areal_flow.core.errors import ConfigError


class Launcher(Protocol):
    """Starts and ends worker processes, each known by the name in its placement."""

    keeps_devices: bool
    """Whether a worker's devices stay the run's while its process is started again."""
    files_per_worker: int
    """How many files the driver keeps open for each process, such as pipes."""

    async def start(self, placement: WorkerPlacement, on_exit: Callable[[str], None]) -> None:
        """Start the process of a worker that has none; return before it has joined the scheduler.

        Args:
            placement: its name, host, environment, threads and resources.
            on_exit: called in the event loop, once, with the cause in words, if the process ends
                before `stop` was called for it.

        Raises:
            EngineError: no process was started.
        """

    def kill(self, name: str) -> bool:
        """End a process that may hang, by force; return whether there was one."""

    async def stop(self, name: str) -> None:
        """End a process, by force only where it takes too long; return when it has ended."""

    def preview(self, placement: WorkerPlacement) -> str:
        """Return what `start` would run, as text for a shell."""

    def pid(self, name: str) -> int | None:
        """Return the number of a process that runs, if it is one of this machine."""

    def processor_use(self, name: str) -> ProcessorUse:
        """Return what the supervisor of a process on another machine reported last."""


LAUNCHERS: dict[str, Callable[[str, ClusterSettings, ForkServer, Path], Launcher]] = {
    "kubernetes": KubernetesLauncher,
    "local": LocalLauncher,
    "slurm": SlurmLauncher,
    "srun": SrunLauncher,
    "ssh": SshLauncher,
}
"""By `cluster.launcher`; each is made from the scheduler's address, the settings, the fork server
of workers and a folder for what workers print; it need not use the last two."""


def make_launcher(
    scheduler: str,
    settings: ClusterSettings,
    fork_server: ForkServer | None = None,
    logs: Path = Path(),
) -> Launcher:
    if settings.launcher not in LAUNCHERS:
        raise ConfigError(
            f"cluster.launcher = {settings.launcher!r}: expected one of {', '.join(LAUNCHERS)}"
        )
    return LAUNCHERS[settings.launcher](scheduler, settings, fork_server or ForkServer(), logs)
