"""Sandboxes of this machine: namespaces, a root in memory, and a filter of system calls.

All of a process are forked from one zygote, and end with it. They see the machine's programs and
libraries, and nothing else of it; there is no network but their own loopback.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from areal_flow.core.errors import ConfigError
from areal_flow.core.machine import system_name
from areal_flow.sandboxes.inside import first, tiers, zygote
from areal_flow.sandboxes.protocol import SandboxLimits
from areal_flow.sandboxes.run import SandboxError, ZygoteClient, available_tiers
from areal_flow.sandboxes.shell import ENVIRONMENT, Process, ShellSandbox

START_TIMEOUT_S = 10.0
_PROGRAMS = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ssl",
    "/etc/mime.types", "/etc/services", "/etc/protocols", tiers.PROC,
)  # fmt: skip
_USER = {"HOME": tiers.WORK, "USER": tiers.USER, "LC_ALL": "C.UTF-8"}
_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
NO_NAMESPACES = (
    "the provider 'local' needs Linux with user namespaces ({reason}): allow them "
    "(sysctl user.max_user_namespaces, the container's seccomp profile), or use 'docker'"
)


@dataclass(frozen=True, slots=True)
class _Limits:
    """The limits of each process, as the zygote reads them."""

    memory_bytes: int
    disk_bytes: int
    num_threads: int
    cpu_s: float = 1e6


class _Zygote:
    """The zygote of this process, started when it is first needed, and again if it has died."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._client: ZygoteClient | None = None

    def get(self) -> ZygoteClient:
        with self._lock:
            if self._client is None or not self._client.is_alive:
                self._client = self._started()
            return self._client

    @staticmethod
    def _started() -> ZygoteClient:
        if tiers.NAMESPACES not in available_tiers():
            raise SandboxError(NO_NAMESPACES.format(reason=f"this is {system_name()}"))
        prefix = () if Path(sys.base_prefix).is_relative_to("/usr") else (sys.base_prefix,)
        try:
            return ZygoteClient(tiers.NAMESPACES, modules=(), readable=(*_PROGRAMS, *prefix))
        except SandboxError as error:
            raise SandboxError(NO_NAMESPACES.format(reason=error)) from None


_ZYGOTE = _Zygote()


class LocalSandbox(ShellSandbox):
    """A sandbox of this machine."""

    def __init__(self, limits: SandboxLimits, *, image: str = "") -> None:
        super().__init__()
        if image:
            raise ConfigError(f"sandbox.image = {image!r}: the provider 'local' has none")
        self._limits = limits
        self._control: socket.socket | None = None
        self._pidfd = -1

    async def start(self) -> None:
        await asyncio.to_thread(self._fork)

    async def close(self) -> None:
        await super().close()
        if self._control:
            self._control.close()
            self._control = None
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = -1

    def _fork(self) -> None:
        reports, report = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        errors = os.memfd_create("errors", os.MFD_CLOEXEC)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        with reports, report, control, os.fdopen(errors, "rb") as stderr, os.fdopen(null):
            limits = _Limits(
                memory_bytes=self._limits.memory_bytes,
                disk_bytes=self._limits.disk_bytes,
                num_threads=self._limits.num_processes,
            )
            fds = [report.fileno(), null, null, errors, control.fileno()]
            _ZYGOTE.get().request(zygote.COMMANDS, fds, limits)
            report.close()
            reports.settimeout(START_TIMEOUT_S)
            message = b""
            while message != b"confined":
                try:
                    message, pidfds, _, _ = socket.recv_fds(reports, 1024, 1)
                except TimeoutError:
                    message, pidfds = b"", []
                if pidfds:
                    (self._pidfd,) = pidfds
                elif message != b"confined":
                    reason = os.pread(stderr.fileno(), 4096, 0).decode(errors="replace")
                    raise SandboxError(f"a sandbox did not start: {reason or 'its zygote died'}")

    async def _start_process(self, arguments: Sequence[str]) -> Process:
        path = os.pathsep.join((f"{sys.base_prefix}/bin", *_PATH))
        request = {
            "do": first.START,
            "arguments": [*arguments],
            "environment": {**ENVIRONMENT, **_USER, "PATH": path},
        }
        reading, writing = os.pipe2(os.O_CLOEXEC)
        own, stdin = socket.socketpair()
        try:
            self._send(request, [stdin.fileno(), writing, writing])
        except BaseException:
            os.close(reading)
            own.close()
            raise
        finally:
            os.close(writing)
            stdin.close()
        reader = asyncio.StreamReader()
        loop, pipe = asyncio.get_running_loop(), os.fdopen(reading, "rb")
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        _, writer = await asyncio.open_unix_connection(sock=own)

        def close() -> None:
            transport.close()
            writer.close()

        return Process(writer, reader, close)

    async def _kill_all(self) -> None:
        self._send({"do": first.KILL})

    def _send(self, request: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        try:
            if self._control is None:
                raise ConnectionError("it was closed")
            socket.send_fds(self._control, [json.dumps(request).encode()], fds)
        except OSError as error:
            raise SandboxError(f"a sandbox is gone: {error}") from None
