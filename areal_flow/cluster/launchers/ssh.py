"""Starts worker processes on other machines, each through an `ssh` connection of its own.

On the host a supervisor (`areal_flow.cluster.supervisor`) starts the worker and ends it when the
connection closes, so that nothing outlives the driver or the network between them.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from areal_flow.cluster.launchers.children import Child, ChildLauncher
from areal_flow.cluster.placement import PROCESS_ENVIRONMENT, WorkerPlacement
from areal_flow.cluster.settings import ClusterSettings
from areal_flow.cluster.supervisor import GRACE_S, KILL
from areal_flow.cluster.worker_process import worker_arguments
from areal_flow.errors import ConfigError

OPTIONS = {
    "BatchMode": "yes",  # fail rather than ask for a password
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
}
CONNECTION_ENDED = 255


class SshLauncher(ChildLauncher):
    """Workers on the hosts of `cluster.remote`; their placements name which."""

    grace_s = GRACE_S + 3.0

    def __init__(self, scheduler: str, settings: ClusterSettings) -> None:
        """Check the settings.

        Raises:
            ConfigError: there are no hosts.
        """
        if not settings.remote.hosts:
            raise ConfigError(
                "cluster.launcher = 'ssh' needs cluster.remote.hosts, such as ['me@10.0.0.7']"
            )
        super().__init__()
        self._scheduler = scheduler
        self._network = settings.network
        self._remote = settings.remote

    def command(self, placement: WorkerPlacement) -> list[str]:
        options = [f"-o{name}={value}" for name, value in OPTIONS.items()]
        # Of two equal options ssh takes the first.
        ssh = ["ssh", "-T", *self._remote.ssh_options, *options, placement.host]
        return [*ssh, self._on_host(placement)]

    def environment(self, placement: WorkerPlacement) -> dict[str, str]:
        return dict(os.environ)

    def describe(self, exit_code: int) -> str:
        if exit_code == CONNECTION_ENDED:
            return "ssh ended"
        return super().describe(128 - exit_code if exit_code > 128 else exit_code)

    def request_end(self, child: Child) -> None:
        child.input.close()

    def request_kill(self, child: Child) -> None:
        child.input.write(KILL)

    def pid(self, name: str) -> int | None:
        return None  # the child is `ssh`; the worker is elsewhere

    def _on_host(self, placement: WorkerPlacement) -> str:
        """Return the shell command that supervises a worker; `env` because glibc reads it early."""
        variables = PROCESS_ENVIRONMENT | placement.environment
        worker = worker_arguments(placement, self._scheduler, self._network)
        supervised = shlex.join(
            [
                *("env", *(f"{name}={value}" for name, value in variables.items())),
                *(self._remote.python or sys.executable, "-m", "areal_flow.cluster.supervisor"),
                *worker,
            ]
        )
        return f"cd {shlex.quote(self._remote.directory or str(Path.cwd()))} && exec {supervised}"
