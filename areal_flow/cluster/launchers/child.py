"""A child process of the driver, what it is started with, and programs that answer at once."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from math import isnan
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from areal_flow.cluster.liveness import ProcessorUse
from areal_flow.cluster.placement import PROCESS_ENVIRONMENT, WorkerPlacement
from areal_flow.cluster.supervisor import REPORT_END, REPORT_START

if TYPE_CHECKING:
    from areal_flow.cluster.launchers.fork_server import ForkedWorker


class _OnStandardError(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr, flush=True)


OUTPUT = logging.getLogger("areal_flow.output")
"""Gets each line that a worker prints, a record whose `worker` names it."""
OUTPUT.setLevel(logging.INFO)
OUTPUT.propagate = False
OUTPUT.addHandler(_OnStandardError())

NUM_LAST_BYTES = 2000
"""Of what a worker printed, where its last line is looked for."""
LAST_OUTPUT_S = 0.1
"""How long to wait for what a process wrote last, once it has ended."""
COMMAND_LIMIT_S = 60.0
PROJECT = str(Path(__file__).parents[3])
"""The folder that areal-flow is imported from."""
SRUN_MESSAGE = re.compile(r"^srun: .*$", re.MULTILINE)
"""`srun` says that its task failed, after what the task says."""
KUBECTL_LOG = re.compile(r"^[EIW]\d{4} .*$", re.MULTILINE)


_REPORT = re.compile(re.escape(REPORT_START) + rb"([\d.]+|nan) (\S)" + re.escape(REPORT_END))


def take_reports(output: bytes) -> tuple[bytes, ProcessorUse | None]:
    """Return output without its supervisor's reports, and the latest of these."""
    *_, last = [None, *_REPORT.finditer(output)]
    if last is None:
        return output, None
    processor_s = float(last[1])
    use = ProcessorUse(None if isnan(processor_s) else processor_s, last[2] == b"D")
    return _REPORT.sub(b"", output), use


def start_process(
    command: Sequence[str],
    placement: WorkerPlacement,
    stdin: int = subprocess.PIPE,
    stdout: int = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Start a program in the environment of a worker."""
    paths = {"PYTHONPATH": os.pathsep.join(import_paths())}
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        bufsize=0,
        env=os.environ | PROCESS_ENVIRONMENT | placement.environment | paths,
        process_group=0,  # no Ctrl-C at a terminal reaches it
    )


class Child:
    """A child process whose output is passed on by line; made and used on the event loop."""

    following: asyncio.Task[None]

    def __init__(self, process: subprocess.Popen[bytes] | ForkedWorker, name: str) -> None:
        self.process, self.name = process, name
        self.ended = asyncio.Event()
        self.is_stopping = False
        self._last_lines = self._unended_line = b""
        self.processor_use = ProcessorUse()
        """As its supervisor reported it, if it has one."""
        self.supervised = asyncio.Event()
        """Set by the first report, and by its end."""
        self._loop = asyncio.get_running_loop()
        assert process.stdin is not None
        assert process.stdout is not None
        self.input, self._output = process.stdin, process.stdout
        self._loop.add_reader(self._output, self._pass_output_on)
        Thread(target=self._wait, daemon=True).start()

    @property
    def last_output(self) -> bytes:
        return self._last_lines + self._unended_line

    def _pass_output_on(self) -> None:
        data = os.read(self._output.fileno(), 1 << 16)
        if not data:
            self._loop.remove_reader(self._output)
        output, use = take_reports(self._unended_line + data)
        if use is not None:
            self.processor_use = use
            self.supervised.set()
        *lines, self._unended_line = re.split(rb"[\r\n]+", output)
        if lines:  # a report alone adds no line
            self._last_lines = b"\n".join([self._last_lines, *lines, b""])[-NUM_LAST_BYTES:]
        for line in lines:
            self._log(line)

    def _log(self, line: bytes) -> None:
        if text := line.decode(errors="replace").rstrip():
            level = logging.getLevelNamesMapping().get(text.partition(" ")[0], logging.INFO)
            OUTPUT.log(level, "%s", text, extra={"worker": self.name})

    def _wait(self) -> None:
        self.process.wait()
        # Not when the pipe closes: a process that this one started may hold it open.
        with suppress(RuntimeError):  # the event loop ended before
            self._loop.call_soon_threadsafe(self._loop.call_later, LAST_OUTPUT_S, self.ended.set)

    def close(self) -> None:
        self._loop.remove_reader(self._output)
        self._log(self._unended_line)
        self.supervised.set()
        self.input.close()
        self._output.close()


def last_line(output: bytes) -> str:
    """Return the message of a Python program that failed."""
    text = SRUN_MESSAGE.sub("", output.decode(errors="replace"))
    return text.strip().rpartition("\n")[2].strip()


def cause_of_exit(code: int, last_output: str) -> str:
    """Return in words how a process ended; a shell adds 128 to a signal, `Popen` negates it."""
    number = -code if code < 0 else code - 128
    if 0 < number < signal.NSIG:
        return f"killed by signal {number}"
    return ": ".join(filter(None, (f"exit status {code}", last_output)))


def import_paths() -> list[str]:
    """Return the driver's additions to Python's search path: workers import the same modules.

    What PYTHONPATH has comes before the standard library. A working directory that comes after it
    is left out, unless areal-flow is there: every process of a run appends its own.
    """
    here, library = os.getcwd(), sysconfig.get_path("stdlib")  # noqa: PTH109 (as text)
    excluded = set(sysconfig.get_paths().values())
    added = [path or here for path in sys.path]
    if library in added and here not in added[: added.index(library)] and here != PROJECT:
        excluded.add(here)
    return [
        path
        for path in added
        if path not in excluded and not path.startswith(library) and not path.endswith(".zip")
    ]


async def run_command(*command: str, stdin: str = "") -> str:
    """Run a program and return what it prints; raise an `OSError` if it fails."""
    # Variables of the driver's own job, if it runs in one, do not hold for the workers' jobs.
    job_variables = {name for name in os.environ if name.startswith("SLURM_")} - {"SLURM_CONF"}
    outside = {name: os.environ[name] for name in os.environ.keys() - job_variables}
    run = partial(subprocess.run, input=stdin, env=outside, timeout=COMMAND_LIMIT_S, text=True)
    try:
        done = await asyncio.to_thread(run, command, capture_output=True)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{command[0]} took longer than {COMMAND_LIMIT_S:.0f} s") from error
    if done.returncode:
        errors = KUBECTL_LOG.sub("", done.stderr).split()
        raise OSError(" ".join(errors) or f"{command[0]}: status {done.returncode}")
    return str(done.stdout)
