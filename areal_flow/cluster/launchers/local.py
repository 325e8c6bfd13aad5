"""Starts worker processes on this machine, as children of the driver."""

from __future__ import annotations

import asyncio
import os
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress

from areal_flow.cluster.placement import PROCESS_ENVIRONMENT, WorkerPlacement
from areal_flow.cluster.settings import ClusterSettings
from areal_flow.cluster.worker_process import worker_arguments
from areal_flow.errors import EngineError

LAST_OUTPUT_S = 0.1
"""How long to wait for what a process wrote last, once it has ended."""


class Child(asyncio.SubprocessProtocol):
    """A child process whose standard error is passed on."""

    transport: asyncio.SubprocessTransport
    following: asyncio.Task[None]

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.is_stopping = False
        self._last_output = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self.transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        sys.stderr.write(data.decode(errors="replace"))
        self._last_output = (self._last_output + data)[-2000:]

    def process_exited(self) -> None:
        # Not when the pipe closes: a process that this one started may hold it open.
        asyncio.get_running_loop().call_later(LAST_OUTPUT_S, self.ended.set)

    def last_line(self) -> str:
        """Return what it wrote last: the message, where a Python program failed."""
        return self._last_output.decode(errors="replace").strip().rpartition("\n")[2].strip()

    def kill(self) -> None:
        """Kill it, if it has not ended yet."""
        with suppress(ProcessLookupError):
            self.transport.kill()


class LocalLauncher:
    """Workers that end with the driver, however the driver ends: the kernel kills them.

    A subclass may have each child stand for a worker that is elsewhere.
    """

    grace_s = 5.0
    """How long a process may take to end after it was asked to."""

    def __init__(self, scheduler: str, settings: ClusterSettings) -> None:
        self._scheduler = scheduler
        self._network = settings.network
        self._children: dict[str, Child] = {}

    def command(self, placement: WorkerPlacement) -> list[str]:
        """Return the program and the arguments of the child."""
        arguments = worker_arguments(placement, self._scheduler, self._network)
        return [sys.executable, *arguments, str(os.getpid())]

    def describe(self, exit_code: int) -> str:
        """Return in words why a child ended; negative codes are signals."""
        return f"killed by signal {-exit_code}" if exit_code < 0 else f"exit status {exit_code}"

    def request_end(self, child: Child) -> None:
        """Ask a child to end in good order."""
        with suppress(ProcessLookupError):
            child.transport.terminate()

    def request_kill(self, child: Child) -> None:
        """End a child's worker by force."""
        child.kill()

    async def start(self, placement: WorkerPlacement, on_exit: Callable[[str], None]) -> None:
        paths = {"PYTHONPATH": os.pathsep.join(import_paths())}
        try:
            _, child = await asyncio.get_running_loop().subprocess_exec(
                Child,
                *self.command(placement),
                env=os.environ | PROCESS_ENVIRONMENT | placement.environment | paths,
                stdout=None,
                process_group=0,  # no Ctrl-C at a terminal reaches it
            )
        except OSError as error:
            raise EngineError(f"{placement.name} cannot be started: {error}") from error
        self._children[placement.name] = child
        child.following = asyncio.ensure_future(self._follow(placement.name, child, on_exit))

    async def _follow(self, name: str, child: Child, on_exit: Callable[[str], None]) -> None:
        await child.ended.wait()
        exit_code = child.transport.get_returncode()
        child.transport.close()
        del self._children[name]
        if not child.is_stopping and exit_code is not None:
            line = child.last_line() if exit_code > 0 else ""
            on_exit(f"{self.describe(exit_code)}{line and ': '}{line}")

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
            child.kill()
            await child.ended.wait()

    def pid(self, name: str) -> int | None:
        child = self._children.get(name)
        return child.transport.get_pid() if child else None


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
