"""Worker processes that are children of the driver, or that such a child stands for."""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from contextlib import suppress

from areal_flow.cluster.launchers.protocol import OnExit
from areal_flow.cluster.placement import WorkerPlacement
from areal_flow.errors import EngineError

LAST_OUTPUT_S = 0.1
"""How long to wait for what a process wrote last, once it has ended."""


class Child(asyncio.SubprocessProtocol):
    """A child process whose standard error is passed on, and whose end is reported once."""

    transport: asyncio.SubprocessTransport

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

    @property
    def input(self) -> asyncio.WriteTransport:
        pipe = self.transport.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        return pipe

    def last_line(self) -> str:
        """Return what it wrote last: the message, where a Python program failed."""
        return self._last_output.decode(errors="replace").strip().rpartition("\n")[2].strip()

    def kill(self) -> None:
        """Kill it, if it has not ended yet."""
        with suppress(ProcessLookupError):
            self.transport.kill()


class ChildLauncher(ABC):
    """A launcher with one child of the driver per worker; subclasses say what the child runs."""

    grace_s = 5.0
    """How long a process may take to end after it was asked to."""

    def __init__(self) -> None:
        self._children: dict[str, Child] = {}
        self._following: set[asyncio.Task[None]] = set()

    @abstractmethod
    def command(self, placement: WorkerPlacement) -> list[str]:
        """Return the program and the arguments that start a worker."""

    @abstractmethod
    def environment(self, placement: WorkerPlacement) -> dict[str, str]:
        """Return all variables of the child."""

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

    async def start(self, placement: WorkerPlacement, on_exit: OnExit) -> None:
        try:
            _, child = await asyncio.get_running_loop().subprocess_exec(
                Child,
                *self.command(placement),
                env=self.environment(placement),
                stdout=None,
                process_group=0,  # no Ctrl-C at a terminal reaches it
            )
        except OSError as error:
            raise EngineError(f"{placement.name} cannot be started: {error}") from error
        self._children[placement.name] = child
        following = asyncio.ensure_future(self._follow(placement.name, child, on_exit))
        self._following.add(following)
        following.add_done_callback(self._following.discard)

    async def _follow(self, name: str, child: Child, on_exit: OnExit) -> None:
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
