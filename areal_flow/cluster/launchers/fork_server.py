"""Workers on this machine as forks of one process, which has imported what they need. Linux only.

Most of a worker's start is imports, which a fork has at once: also where a killed worker starts
again. The driver's `ForkServer` sends a request for each worker to the process that `serve_forks`
runs. That process imports nothing that has threads, which a fork would lack: no Polars and no CUDA.
"""

from __future__ import annotations

import asyncio
import gc
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import IO, Any

import numpy as np

from areal_flow.cluster.launchers.child import start_process
from areal_flow.cluster.placement import THIS_MACHINE, WorkerPlacement
from areal_flow.cluster.worker import end_with_parent, work
from areal_flow.core.machine import is_linux, raise_open_files_limit

MODULES = (
    "areal_flow.cluster.trainer_tasks",
    "areal_flow.rollout.engines.torch_engine",
    "areal_flow.training.rank",
    "areal_flow.training.sft",
    "pandas",
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
)
"""Of this project and, of others, what is otherwise imported by its first use."""
REQUEST_BYTES = 1 << 16
NUMBER_BYTES = 4
"""Of a process number and of an exit code."""


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
            program = f"from {__name__} import serve_forks; serve_forks({os.getpid()})"
            command = [sys.executable, "-P", "-c", program]
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
            pid = read_int(report)
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


def read_int(report: IO[bytes]) -> int:
    """Read what the fork server sends; if it has ended, the kernel has killed its forks."""
    data = report.read(NUMBER_BYTES)
    return int.from_bytes(data, "big", signed=True) if data else -signal.SIGKILL


class ForkedWorker:
    """A worker that the fork server forked, with what a `Child` needs of a `Popen`."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], report: IO[bytes]) -> None:
        """Take its number, its pipes, and the pipe on which its exit code will come."""
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | Any = None
        self._report = report

    def wait(self) -> int:
        with self._report:
            self.returncode = read_int(self._report)
        return self.returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def serve_forks(parent: int) -> None:
    """Serve the socket that is the standard input; a fork goes on as a worker.

    Args:
        parent: the number of the process that started this one.
    """
    end_with_parent(parent)
    for module in MODULES:
        import_module(module)
    raise_open_files_limit()
    gc.freeze()  # or the first collection in each fork would copy every page
    work(fork_for_requests(socket.socket(fileno=sys.stdin.fileno())))


def fork_for_requests(requests: socket.socket) -> str:
    """Fork for each request; return in a fork, with its options.

    A message has the options of a worker and three descriptors: its input, its output, and a pipe
    that gets its process number and, once it has ended, its exit code; nothing if the fork fails.
    The end of messages ends this process, and the kernel its forks.
    """
    fork_server = os.getpid()
    running: dict[int, tuple[int, int]] = {}
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        ready = {key.fd for key, _ in selector.select()}
        for ended in ready & running.keys():
            selector.unregister(ended)
            _report(ended, *running.pop(ended))
        if requests.fileno() not in ready:
            continue
        options, descriptors, *_ = socket.recv_fds(requests, REQUEST_BYTES, 3)
        if not options:
            sys.exit()
        try:
            standard_input, output, report = descriptors
            pid = os.fork()
        except (OSError, ValueError):  # too many processes, or descriptors
            for descriptor in descriptors:  # the end of `report` tells the driver
                os.close(descriptor)
            continue
        if not pid:
            selector.close()
            requests.close()
            for descriptor, (_, reported) in running.items():
                os.close(descriptor)
                os.close(reported)
            _become_worker(fork_server, standard_input, output, report)
            return options.decode()
        os.close(standard_input)
        os.close(output)
        _send(report, pid)
        running[descriptor := os.pidfd_open(pid)] = pid, report
        selector.register(descriptor, selectors.EVENT_READ)


def _report(ended: int, pid: int, report: int) -> None:
    _send(report, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.close(ended)
    os.close(report)


def _send(report: int, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(report, number.to_bytes(NUMBER_BYTES, "big", signed=True))


def _become_worker(fork_server: int, standard_input: int, output: int, report: int) -> None:
    os.setpgid(0, 0)  # no Ctrl-C at a terminal reaches it
    for descriptor, standard in ((standard_input, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, standard)
    for descriptor in (standard_input, output, report):
        os.close(descriptor)
    end_with_parent(fork_server)
    np.random.seed()  # else all forks would draw the same numbers; `random` does this by itself
