"""Starts worker processes on this machine, as children of the driver."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from areal_flow.cluster.launchers.child import (
    Child,
    cause_of_exit,
    last_line,
    start_process,
)
from areal_flow.cluster.launchers.fork_server import ForkServer
from areal_flow.cluster.liveness import ProcessorUse
from areal_flow.cluster.placement import PROCESS_ENVIRONMENT, WORKER_PROGRAM, WorkerPlacement
from areal_flow.cluster.worker import worker_options
from areal_flow.config.cluster import ClusterSettings
from areal_flow.core.errors import EngineError


class LocalLauncher:
    """Workers that end with the driver: the kernel kills them if the driver dies."""

    keeps_devices = True
    files_per_worker = 3  # input, output, and the fork server's report
    grace_s = 5.0
    """How long a process may take to end after SIGTERM."""

    def __init__(
        self, scheduler: str, settings: ClusterSettings, fork_server: ForkServer, logs: Path
    ) -> None:
        self._scheduler = scheduler
        self._fork_server = fork_server
        self._network = settings.network
        self._children: dict[str, Child] = {}

    def command(self, placement: WorkerPlacement, options: str) -> list[str]:
        return [sys.executable, "-P", *WORKER_PROGRAM, options, str(os.getpid())]

    def preview(self, placement: WorkerPlacement) -> str:
        options = worker_options(placement, self._scheduler, self._network)
        variables = (PROCESS_ENVIRONMENT | placement.environment).items()
        assigned = [f"{name}={value}" for name, value in variables]
        return shlex.join(["env", *assigned, *self.command(placement, options)])

    def describe(self, exit_code: int, last_output: str) -> str:
        return cause_of_exit(exit_code, last_output)

    def request_end(self, child: Child) -> None:
        child.process.terminate()

    def request_kill(self, child: Child) -> None:
        child.process.kill()

    async def start(self, placement: WorkerPlacement, on_exit: Callable[[str], None]) -> None:
        options = worker_options(placement, self._scheduler, self._network)
        try:
            forked = await self._fork_server.fork(placement, options)
            process = forked or start_process(self.command(placement, options), placement)
            child = Child(process, placement.name)
        except OSError as error:
            raise EngineError(f"{placement.name} cannot be started: {error}") from error
        self._children[placement.name] = child
        child.following = asyncio.ensure_future(self._follow(placement.name, child, on_exit))

    async def _follow(self, name: str, child: Child, on_exit: Callable[[str], None]) -> None:
        await child.ended.wait()
        child.close()
        del self._children[name]
        if not child.is_stopping:
            on_exit(self.describe(child.process.returncode, last_line(child.last_output)))

    def kill(self, name: str) -> bool:
        child = self._children.get(name)
        if child is not None:
            self.request_kill(child)
        return child is not None

    async def stop(self, name: str) -> None:
        child = self._children.get(name)
        if child is None:
            return
        child.is_stopping = True
        self.request_end(child)
        try:
            await asyncio.wait_for(child.ended.wait(), self.grace_s)
        except TimeoutError:
            child.process.kill()
            await child.ended.wait()

    def pid(self, name: str) -> int | None:
        child = self._children.get(name)
        return child.process.pid if child else None

    def processor_use(self, name: str) -> ProcessorUse:
        child = self._children.get(name)
        return child.processor_use if child else ProcessorUse()
