"""One or several processes in a sandbox, from their beginning to the end of the last.

What they write is collected up to a limit; time is limited on the processor and on the wall.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

from areal_flow.rewards.code.sandbox.limits import Limits, SandboxError
from areal_flow.rewards.code.sandbox.zygote_client import ZygoteClient

STDERR_BYTES = 4096
"""Kept of standard error."""
MAX_STDERR_BYTES = 64 * 2**20
SILENCE_S = 10.0
"""A zygote that does not report for so long is replaced."""
_CHUNK = 1 << 16
_CPU_CLOCK = 2


@dataclass(frozen=True, slots=True)
class Program:
    mode: str
    source: bytes
    stdin: bytes = b""
    others: tuple[int | bytes | None, ...] = ()
    """What it has from descriptor 4 on: one that is given away, bytes to read, or, as None, a pipe
    whose content is the outcome's `answer`."""
    imports: bool = False
    """Whether it finds common names of the standard library without importing them."""


@dataclass(slots=True)
class Outcome:
    exit_code: int = 0
    """Negative: a signal's number."""
    cpu_s: float = 0.0
    timed_out: Literal["", "cpu", "wall"] = ""
    is_output_over: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    """Its beginning."""
    answer: bytes = b""


@dataclass(slots=True)
class _Output:
    """What comes out of a pipe: its beginning is kept, and beyond a limit the process ends."""

    kept: int
    limit: int
    size: int = 0
    content: bytearray = field(default_factory=bytearray)
    is_over: bool = False

    def take(self, fd: int) -> bool:
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        self.size += len(chunk)
        self.content += chunk[: self.kept - len(self.content)]
        self.is_over = self.size > self.limit
        return bool(chunk) and not self.is_over


def run_programs(
    zygote: ZygoteClient,
    programs: Sequence[Program],
    limits: Limits,
    *,
    on_slow: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Run programs side by side; when one is stopped, or the last one ends, all are ended.

    `on_slow` is called once if they are not done within the processor time of one.
    """
    processes: list[_Process] = []
    try:
        for program in programs:
            processes.append(_Process(zygote, program, limits))
        _supervise(processes, limits, on_slow)
        return [process.outcome for process in processes]
    finally:
        for process in processes:
            process.close()


def _supervise(processes: Sequence[_Process], limits: Limits, on_slow: Callable[[], None]) -> None:
    poller = select.poll()
    owners = {fd: process for process in processes for fd in process.descriptors}
    for fd in owners:
        poller.register(fd, select.POLLIN)
    began = monotonic()
    next_check, is_slow = began + limits.cpu_s, False
    while not processes[-1].is_done:
        for fd, _ in poller.poll(max(0.0, next_check - monotonic()) * 1000 + 1):
            if not owners[fd].handle(fd):
                poller.unregister(fd)
        if monotonic() >= next_check:
            if not is_slow:
                on_slow()
                is_slow = True
            waits = [p.check_time(monotonic() - began) for p in processes if not p.is_done]
            next_check = monotonic() + min(waits, default=0.0)
        if any(process.is_stopped for process in processes):
            break
    for process in processes:
        process.stop()
        while not process.is_done:
            process.handle(process.reply)


class _Process:
    def __init__(self, zygote: ZygoteClient, program: Program, limits: Limits) -> None:
        self._limits = limits
        self.outcome = Outcome()
        self.is_done = self.is_stopped = self._is_confined = False
        self._pidfd = -1
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.reply = self._socket.fileno()
        self._socket.settimeout(SILENCE_S)
        self._outputs: dict[int, _Output] = {}
        given = [theirs.detach(), memory_file(program.stdin), self._pipe(limits.output_bytes)]
        given += [self._pipe(MAX_STDERR_BYTES, kept=STDERR_BYTES), memory_file(program.source)]
        for other in program.others:
            if other is None:
                given.append(self._pipe(limits.output_bytes))
            else:
                given.append(memory_file(other) if isinstance(other, bytes) else other)
        self._stdout, self._stderr, *self._answers = self._outputs
        try:
            zygote.request(program.mode, given, limits, imports=program.imports)
        except SandboxError:
            self.close()
            raise
        finally:
            for fd in given:
                os.close(fd)

    @property
    def descriptors(self) -> tuple[int, ...]:
        return self.reply, *self._outputs

    def _pipe(self, limit: int, *, kept: int | None = None) -> int:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        self._outputs[reading] = _Output(limit if kept is None else kept, limit)
        return writing

    def handle(self, fd: int) -> bool:
        if fd == self.reply:
            self._hear()
            return not self.is_done
        output = self._outputs[fd]
        has_more = output.take(fd)
        if output.is_over:
            self.stop()
        return has_more

    def _hear(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._socket, 1024, 1)
        except TimeoutError:
            raise SandboxError(f"a zygote said nothing for {SILENCE_S:g} s") from None
        if not message:
            raise SandboxError("a sandbox died during a run")
        if fds:
            (self._pidfd,) = fds
        elif message == b"confined":
            self._is_confined = True
        else:
            self._end(json.loads(message))

    def _end(self, report: dict[str, float]) -> None:
        for fd, output in self._outputs.items():
            while output.take(fd):
                pass
        stdout, stderr = (bytes(self._outputs[fd].content) for fd in (self._stdout, self._stderr))
        if not self._is_confined:
            why = stderr.decode(errors="replace") or f"exit code {report['exit_code']}"
            raise SandboxError(f"a process could not be confined: {why}")
        outcome = self.outcome
        outcome.exit_code, outcome.cpu_s = int(report["exit_code"]), report["cpu_s"]
        outcome.stdout, outcome.stderr = stdout, stderr
        outcome.answer = b"".join(bytes(self._outputs[fd].content) for fd in self._answers)
        outcome.is_output_over = any(output.is_over for output in self._outputs.values())
        if not outcome.timed_out and outcome.cpu_s >= self._limits.cpu_s:
            outcome.timed_out = "cpu"
        self.is_done = True

    def check_time(self, elapsed_s: float) -> float:
        """Stop the process if its time is over; return when to look again, in seconds."""
        used_s = _cpu_time(self._pidfd) if self._pidfd >= 0 else 0.0
        if used_s >= self._limits.cpu_s:
            self.outcome.timed_out = "cpu"
        elif elapsed_s >= self._limits.wall_s:
            self.outcome.timed_out = "wall"
        if self.outcome.timed_out:
            self.stop()
        left_s = min(self._limits.cpu_s - used_s, self._limits.wall_s - elapsed_s)
        return max(left_s, 0.01)

    def stop(self) -> None:
        while self._pidfd < 0:
            self._hear()
        self.is_stopped = True
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        if self._pidfd >= 0:
            self.stop()
        self._socket.close()
        for fd in (*self._outputs, *((self._pidfd,) if self._pidfd >= 0 else ())):
            os.close(fd)


def memory_file(content: bytes) -> int:
    """Return a descriptor of a file in memory that nobody can change any more."""
    fd = os.memfd_create("given", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _cpu_time(pidfd: int) -> float:
    """Return the processor time of a process and its threads; 0 if it has ended."""
    with open(f"/proc/self/fdinfo/{pidfd}") as lines:  # noqa: PTH123 - of this process
        pid = next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))
    try:
        return time.clock_gettime((~pid << 3) | _CPU_CLOCK)
    except OSError:
        return 0.0
