"""Runs programs in a zygote: starts it in an empty environment, and supervises each run.

Output is collected up to a limit; processor time and wall time are limited.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from areal_flow.core.errors import InfrastructureError, RewardError
from areal_flow.core.machine import is_linux
from areal_flow.sandboxes.inside import tiers

START_S = 60.0
"""Time limit; it usually takes 0.1 s."""
END_S = 1.0
"""A zygote that does not end within this time after its socket was closed is killed."""
ENVIRONMENT = {
    "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "HOME": "/tmp",
    "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
_START = "import sys; sys.path.append({!r}); from inside.zygote import main; main()"
_LIBRARIES = (
    "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo",
)  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
STDERR_BYTES = 4096
"""Bytes of standard error that are kept."""
MAX_STDERR_BYTES = 64 * 2**20
SILENCE_S = 10.0
"""A zygote that does not report within this time is replaced."""
_CHUNK = 1 << 16
_CPU_CLOCK = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one run of a program."""

    cpu_s: float = 4.0
    wall_per_cpu: float = 3.0
    """A run may last this many times its processor time: the machine is shared."""
    memory_bytes: int = 2**30
    """Address space, including Python and its modules."""
    output_bytes: int = 4 * 2**20
    """Size of standard output, and of each other pipe that is read."""
    num_threads: int = 128
    """Threads of one program; it cannot start processes. Not enforced by the tier `landlock` for an
    ordinary user, whose other processes would count as well."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            is_float = isinstance(limit.default, float)
            types = int | float if is_float else int
            if isinstance(value, bool) or not isinstance(value, types) or not 0 < value < 2**50:
                kind = "number" if is_float else "whole number"
                raise RewardError(
                    f"limit {limit.name} of programs: expected a {kind} above 0, found {value!r}"
                )

    @property
    def wall_s(self) -> float:
        return self.wall_per_cpu * self.cpu_s


class SandboxError(InfrastructureError):
    """A sandbox cannot be started, or died: an error of the infrastructure, never a verdict."""


class ZygoteClient:
    """A zygote, which forks a process for each run; runs may overlap."""

    def __init__(
        self, tier: str, *, modules: Sequence[str] = ("numpy",), readable: Sequence[str] = ()
    ) -> None:
        """Start a zygote; programs may import `modules` besides the standard library.

        Args:
            readable: the places that can be read there, instead of the standard library's.
        """
        self.tier = tier
        own_path = str(Path(__file__).parent)
        folders = {name: Path(spec.origin).parent for name in modules
                 if (spec := find_spec(name)) and spec.origin}  # fmt: skip
        settings = {
            "tier": tier,
            "own_path": own_path,
            "site": sorted({str(folder.parent) for folder in folders.values()}),
            "modules": list(folders),
            "readable": _existing(readable) if readable else _readable(folders.values()),
            "devices": [path for path in _DEVICES if Path(path).exists()],
        }
        self._control, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        errors = os.memfd_create("errors", os.MFD_CLOEXEC)
        arguments = (str(peer.fileno()), json.dumps(settings))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-S", "-B", "-c", _START.format(own_path), *arguments],
            env=ENVIRONMENT,
            cwd="/",
            pass_fds=[peer.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        peer.close()
        with os.fdopen(errors, "rb") as stderr:
            self._wait_until_ready(stderr.fileno())

    def _wait_until_ready(self, errors: int) -> None:
        self._control.settimeout(START_S)
        try:
            ready = self._control.recv(64)
        except OSError as error:
            ready, message = b"", str(error)
        else:
            message = os.pread(errors, 1 << 16, 0).decode(errors="replace").strip()
        if not ready:
            self.close()
            reason = message.splitlines()[-1] if message else "it ended without a word"
            raise SandboxError(f"sandbox tier {self.tier!r}: {reason}")
        self._control.settimeout(None)

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def request(
        self, mode: str, fds: Sequence[int], limits: Mapping[str, Any], *, imports: bool = False
    ) -> None:
        """Request a run: `fds` are the socket for its reports, and its descriptors from 0 on."""
        message = {"mode": mode, "imports": imports, **limits}
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds)
        except OSError as error:
            raise SandboxError(f"a sandbox's zygote is gone: {error}") from None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def available_tiers() -> tuple[str, ...]:
    """Return the tiers of this system, the strongest first; only Linux has any."""
    return (tiers.NAMESPACES, tiers.LANDLOCK) if is_linux() else ()


def _readable(packages: Iterable[Path]) -> list[str]:
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    for package in packages:
        folders += [package, package.with_name(f"{package.name}.libs")]
    return _existing([*map(str, folders), *_LIBRARIES])


def _existing(paths: Sequence[str]) -> list[str]:
    return [path for path in dict.fromkeys(paths) if Path(path).exists()]


@dataclass(frozen=True, slots=True)
class Program:
    mode: str
    source: bytes
    stdin: bytes = b""
    descriptors: tuple[int | bytes | None, ...] = ()
    """Its descriptors from 4 on: a descriptor, bytes to read, or None for a pipe whose content
    becomes the outcome's `answer`."""
    imports: bool = False
    """Whether common names of the standard library are predefined."""


@dataclass(slots=True)
class Outcome:
    exit_code: int = 0
    """Negative: the number of a signal."""
    cpu_s: float = 0.0
    timed_out: Literal["", "cpu", "wall"] = ""
    is_output_over: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    """The first `STDERR_BYTES`."""
    answer: bytes = b""


@dataclass(slots=True)
class _Output:
    """Output of a pipe: the first `kept` bytes are kept; beyond `limit` the process is stopped."""

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
    """Run programs concurrently; when one is stopped, or the last one ends, all are ended.

    `on_slow` is called once if they take longer than the limit of processor time.
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
        self._socket, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.reply = self._socket.fileno()
        self._socket.settimeout(SILENCE_S)
        self._outputs: dict[int, _Output] = {}
        fds = [peer.detach(), memory_file(program.stdin), self._pipe(limits.output_bytes)]
        fds += [self._pipe(MAX_STDERR_BYTES, kept=STDERR_BYTES), memory_file(program.source)]
        for descriptor in program.descriptors:
            if descriptor is None:
                fds.append(self._pipe(limits.output_bytes))
            else:
                fds.append(memory_file(descriptor) if isinstance(descriptor, bytes) else descriptor)
        self._stdout, self._stderr, *self._answers = self._outputs
        try:
            zygote.request(program.mode, fds, asdict(limits), imports=program.imports)
        except SandboxError:
            self.close()
            raise
        finally:
            for fd in fds:
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
            self._receive()
            return not self.is_done
        output = self._outputs[fd]
        has_more = output.take(fd)
        if output.is_over:
            self.stop()
        return has_more

    def _receive(self) -> None:
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
        """Stop the process if its time is up; return the seconds until the next check."""
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
            self._receive()
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
    """Return a descriptor of a read-only file in memory."""
    fd = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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
