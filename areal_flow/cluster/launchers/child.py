"""A child process of the driver, and what it is started with."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread

from areal_flow.cluster.placement import PROCESS_ENVIRONMENT, WorkerPlacement

LAST_OUTPUT_S = 0.1
"""How long to wait for what a process wrote last, once it has ended."""


def start_process(command: Sequence[str], placement: WorkerPlacement) -> subprocess.Popen[bytes]:
    """Start a program in the environment of a worker; its standard input is a pipe."""
    paths = {"PYTHONPATH": os.pathsep.join(import_paths())}
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=os.environ | PROCESS_ENVIRONMENT | placement.environment | paths,
        process_group=0,  # no Ctrl-C at a terminal reaches it
    )


class Child:
    """A child process whose standard error is passed on; made and used on the event loop."""

    following: asyncio.Task[None]

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.ended = asyncio.Event()
        self.is_stopping = False
        self._last_output = b""
        self._loop = asyncio.get_running_loop()
        assert process.stdin is not None
        assert process.stderr is not None
        self.input, self._output = process.stdin, process.stderr
        self._loop.add_reader(self._output, self._pass_output_on)
        Thread(target=self._wait, daemon=True).start()

    def _pass_output_on(self) -> None:
        data = os.read(self._output.fileno(), 1 << 16)
        if not data:
            self._loop.remove_reader(self._output)
        sys.stderr.write(data.decode(errors="replace"))
        self._last_output = (self._last_output + data)[-2000:]

    def _wait(self) -> None:
        self.process.wait()
        # Not when the pipe closes: a process that this one started may hold it open.
        with suppress(RuntimeError):  # the event loop ended before
            self._loop.call_soon_threadsafe(self._loop.call_later, LAST_OUTPUT_S, self.ended.set)

    def last_line(self) -> str:
        """Return its last line on standard error: the message of a Python program that failed."""
        return self._last_output.decode(errors="replace").strip().rpartition("\n")[2].strip()

    def close(self) -> None:
        self._loop.remove_reader(self._output)
        self.input.close()
        self._output.close()


def import_paths() -> list[str]:
    """Return the driver's additions to Python's search path: workers import the same modules."""
    own = set(sysconfig.get_paths().values())
    library = sysconfig.get_path("stdlib")
    added = [path or os.getcwd() for path in sys.path]  # noqa: PTH109 (a search path is text)
    return [
        path
        for path in added
        if path not in own and not path.startswith(library) and not path.endswith(".zip")
    ]
