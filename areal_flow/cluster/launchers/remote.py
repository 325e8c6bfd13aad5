"""Starts worker processes on other machines, each through an `ssh` or `srun` of its own.

On the host a supervisor (`areal_flow.cluster.supervisor`) starts the worker and ends it when its
input closes, so that nothing outlives the driver or the network between them.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from areal_flow.cluster.launchers.child import Child
from areal_flow.cluster.launchers.fork_server import ForkServer
from areal_flow.cluster.launchers.local import LocalLauncher
from areal_flow.cluster.launchers.staging import StagedStarts
from areal_flow.cluster.placement import PROCESS_ENVIRONMENT, WORKER_PROGRAM, WorkerPlacement
from areal_flow.cluster.registry import UNREACHABLE
from areal_flow.cluster.supervisor import GRACE_S, KILL
from areal_flow.cluster.worker import worker_options
from areal_flow.config.cluster import ClusterSettings
from areal_flow.core.errors import ConfigError

SSH_OPTIONS = {
    "BatchMode": "yes",  # fail rather than ask for a password
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
}
SRUN_OPTIONS = (
    *("--nodes=1", "--ntasks=1", "--ntasks-per-node=1"),
    "--overlap",  # workers divide the job's cores, memory and GPUs themselves
    *("--cpu-bind=none", "--mpi=none", "--unbuffered"),
)
CONNECTION_ENDED = 255
MAX_CONNECTING = 5
"""Connections to one host that are being made at a time: by default sshd drops some of those that
exceed ten, whoever made them."""
MAX_STEPS_STARTING = 16
"""Steps that `srun` asks Slurm's controller for at a time: it serves other users, too."""
CONNECTING_LIMIT_S = 20.0
"""After so long without a word from the supervisor, the next worker is started all the same."""


class RemoteLauncher(LocalLauncher):
    """Workers on the hosts that their placements name; a subclass says how to reach them."""

    files_per_worker = 2
    grace_s = GRACE_S + 3.0
    max_starting: int
    """Workers that may be starting at a time at one place."""

    def __init__(
        self, scheduler: str, settings: ClusterSettings, fork_server: ForkServer, logs: Path
    ) -> None:
        super().__init__(scheduler, settings, fork_server, logs)
        self._settings = settings
        self._starts = StagedStarts(self.max_starting)

    def place(self, placement: WorkerPlacement) -> str:
        """Return what serves the start of a worker."""
        return placement.host

    async def start(self, placement: WorkerPlacement, on_exit: Callable[[str], None]) -> None:
        async with self._starts.turn(self.place(placement)):
            await super().start(placement, on_exit)
            supervised = self._children[placement.name].supervised
            with suppress(TimeoutError):
                await asyncio.wait_for(supervised.wait(), CONNECTING_LIMIT_S)

    def supervised(
        self, placement: WorkerPlacement, options: str, python: str, *flags: str
    ) -> list[str]:
        """Return what runs on the host: a supervisor, and its worker in its environment."""
        # `env` because glibc reads its variables before Python starts, and Slurm sets its own.
        variables = PROCESS_ENVIRONMENT | placement.environment
        return [
            *("env", *(f"{name}={value}" for name, value in variables.items())),
            *(python, *flags, "-m", "areal_flow.cluster.supervisor"),
            *(*flags, *WORKER_PROGRAM, options),
        ]

    def preview(self, placement: WorkerPlacement) -> str:
        options = worker_options(placement, self._scheduler, self._network)
        return shlex.join(self.command(placement, options))

    def request_end(self, child: Child) -> None:
        child.input.close()

    def request_kill(self, child: Child) -> None:
        with suppress(OSError):  # it ended meanwhile
            child.input.write(KILL)

    def pid(self, name: str) -> int | None:
        return None  # the child is `ssh` or `srun`; the worker is elsewhere


class SrunLauncher(RemoteLauncher):
    """Workers on the nodes of the Slurm job that the driver runs in, each as a step of it.

    All nodes are there when the job starts, and a worker that dies waits in no queue.
    """

    max_starting = MAX_STEPS_STARTING

    def place(self, placement: WorkerPlacement) -> str:
        return ""  # the controller, wherever the step runs

    def command(self, placement: WorkerPlacement, options: str) -> list[str]:
        of_user = self._settings.slurm_options(placement.role)
        where = f"--nodelist={placement.host}", f"--chdir={Path.cwd()}"
        worker = self.supervised(placement, options, sys.executable, "-P")
        return ["srun", *SRUN_OPTIONS, *where, *of_user, *worker]


class SshLauncher(RemoteLauncher):
    """Workers on the hosts of `cluster.remote`."""

    max_starting = MAX_CONNECTING

    def __init__(
        self, scheduler: str, settings: ClusterSettings, fork_server: ForkServer, logs: Path
    ) -> None:
        if not settings.remote.hosts:
            raise ConfigError(
                "cluster.launcher = 'ssh' needs cluster.remote.hosts, such as ['me@10.0.0.7']"
            )
        super().__init__(scheduler, settings, fork_server, logs)
        self._remote = settings.remote

    def command(self, placement: WorkerPlacement, options: str) -> list[str]:
        ssh_options = [f"-o{name}={value}" for name, value in SSH_OPTIONS.items()]
        # Of two equal options ssh takes the first.
        ssh = ["ssh", "-T", *self._remote.ssh_options, *ssh_options, placement.host]
        worker = self.supervised(placement, options, self._remote.python or sys.executable)
        directory = shlex.quote(self._remote.directory or str(Path.cwd()))
        return [*ssh, f"cd {directory} && exec {shlex.join(worker)}"]

    def describe(self, exit_code: int, last_output: str) -> str:
        if exit_code == CONNECTION_ENDED:
            return ": ".join(filter(None, (UNREACHABLE, last_output)))
        return super().describe(exit_code, last_output)
