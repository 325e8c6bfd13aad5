"""Workers on this machine as forks of one process, which has imported what they need."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO

from areal_flow.cluster.launchers.child import ForkedWorker, number_in, start_process
from areal_flow.cluster.placement import THIS_MACHINE, WorkerPlacement
from areal_flow.core.machine import is_linux


class ForkServer:
    """A process that forks workers of one environment on this machine, without GPUs."""

    def __init__(self, placements: Iterable[WorkerPlacement] = ()) -> None:
        """Start it if any of these placements can be forked."""
        self._process: subprocess.Popen[bytes] | None = None
        # A reward worker alone needs little of what the fork server imports.
        served = [each for each in placements if each.role != "reward" and _can_be_forked(each)]
        for placement in served[:1]:
            self._environment = placement.environment
            self._requests, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            program = "areal_flow.cluster.fork_server"
            command = [sys.executable, "-P", "-m", program, str(os.getpid())]
            with theirs, suppress(OSError):  # the launcher will say so
                self._process = start_process(
                    command, placement, theirs.fileno(), subprocess.DEVNULL
                )

    async def fork(self, placement: WorkerPlacement, options: str) -> ForkedWorker | None:
        """Return a worker that gets the options, or `None` if it cannot be forked."""
        if self._process is None or not _can_be_forked(placement):
            return None
        if placement.environment != self._environment:
            return None
        (read_input, write_input), (read_output, write_output), (read_report, write_report) = (
            os.pipe() for _ in range(3)
        )
        with ExitStack() as ours:
            stdin = ours.enter_context(os.fdopen(write_input, "wb", buffering=0))
            stdout = ours.enter_context(os.fdopen(read_output, "rb", buffering=0))
            report = ours.enter_context(os.fdopen(read_report, "rb", buffering=0))
            theirs = read_input, write_output, write_report
            with suppress(OSError):  # it ended, and so does the report
                socket.send_fds(self._requests, [options.encode()], theirs)
            for descriptor in theirs:
                os.close(descriptor)
            await _until_readable(report)
            pid = number_in(report)
            if pid < 0:
                return None
            ours.pop_all()
        return ForkedWorker(pid, stdin, stdout, report)

    def close(self) -> None:
        """End the fork server, and with it any worker that is left."""
        if self._process is not None:
            self._requests.close()
            self._process.kill()
            self._process.wait()


@contextmanager
def start_fork_server(placements: Iterable[WorkerPlacement]) -> Iterator[ForkServer]:
    fork_server = ForkServer(placements)
    try:
        yield fork_server
    finally:
        fork_server.close()


def _can_be_forked(placement: WorkerPlacement) -> bool:
    # A fork could not use a GPU that its parent has looked at.
    return is_linux() and placement.host == THIS_MACHINE and not placement.num_gpus


async def _until_readable(pipe: IO[bytes]) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(pipe)
