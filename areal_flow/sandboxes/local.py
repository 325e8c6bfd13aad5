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
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock
from types import MappingProxyType

from areal_flow.core.errors import ConfigError
from areal_flow.core.machine import system_name
from areal_flow.sandboxes.inside import first, tiers, zygote
from areal_flow.sandboxes.protocol import SandboxLimits
from areal_flow.sandboxes.run import SandboxError, ZygoteClient, available_tiers
from areal_flow.sandboxes.shell import Process, ShellSandbox

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


_STARTING = Lock()
_ZYGOTES: list[ZygoteClient] = []
"""The zygote of this process."""


def _zygote() -> ZygoteClient:
    """Return the zygote, started when it is first needed, and again if it has died."""
    with _STARTING:
        if not _ZYGOTES or not _ZYGOTES[0].is_alive:
            if tiers.NAMESPACES not in available_tiers():
                raise SandboxError(NO_NAMESPACES.format(reason=f"this is {system_name()}"))
            prefix = () if Path(sys.base_prefix).is_relative_to("/usr") else (sys.base_prefix,)
            readable = (*_PROGRAMS, *prefix)
            try:
                _ZYGOTES[:] = [ZygoteClient(tiers.NAMESPACES, modules=(), readable=readable)]
            except SandboxError as error:
                raise SandboxError(NO_NAMESPACES.format(reason=error)) from None
        return _ZYGOTES[0]


class LocalSandbox(ShellSandbox):
    """A sandbox of this machine."""

    def __init__(
        self,
        limits: SandboxLimits,
        *,
        image: str = "",
        workdir: str = "",
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        path = os.pathsep.join((f"{sys.base_prefix}/bin", *_PATH))
        super().__init__(workdir=workdir, variables={**_USER, "PATH": path, **variables})
        if image:
            raise ConfigError(f"sandbox.image = {image!r}: the provider 'local' has none")
        self._limits = limits
        self._control: socket.socket | None = None
        self._pidfd = -1

    async def start(self) -> None:
        forking = asyncio.ensure_future(asyncio.to_thread(self._fork))
        try:
            self._control, self._pidfd = await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(_discard)
            raise
        except OSError as error:
            raise SandboxError(f"a sandbox did not start: {error}") from error

    async def close(self) -> None:
        await super().close()
        if self._control:
            _end(self._control, self._pidfd)
            self._control = None

    def _fork(self) -> tuple[socket.socket, int]:
        """Return the socket of a new sandbox's first process, and that process."""
        own, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with control:
            try:
                return own, self._confined(control)
            except BaseException:
                own.close()
                raise

    def _confined(self, control: socket.socket) -> int:
        with ExitStack() as opened:
            reports, report = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            opened.enter_context(reports)
            opened.enter_context(report)
            errors = os.memfd_create("errors", os.MFD_CLOEXEC)
            stderr = opened.enter_context(os.fdopen(errors, "rb"))
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            opened.callback(os.close, null)
            num_threads = self._limits.num_processes
            limits = {**dict(self._limits), "num_threads": num_threads, "cpu_s": 1e6}
            fds = [report.fileno(), null, null, errors, control.fileno()]
            _zygote().request(zygote.COMMANDS, fds, limits)
            report.close()
            reports.settimeout(START_TIMEOUT_S)
            pidfd, is_confined = -1, False
            while pidfd < 0 or not is_confined:  # the process may report before its zygote
                try:
                    message, pidfds, _, _ = socket.recv_fds(reports, 1024, 1)
                except TimeoutError:
                    message, pidfds = b"", []
                if pidfds:
                    (pidfd,) = pidfds
                elif message == b"confined":
                    is_confined = True
                else:
                    if pidfd >= 0:
                        os.close(pidfd)
                    reason = os.pread(stderr.fileno(), 4096, 0).decode(errors="replace")
                    raise SandboxError(f"a sandbox did not start: {reason or 'its zygote died'}")
            return pidfd

    async def _start_process(self, arguments: Sequence[str]) -> Process:
        request = {
            "do": first.START,
            "arguments": [*arguments],
            "environment": self._variables,
            "workdir": self._workdir,
        }
        try:
            reading, writing = os.pipe2(os.O_CLOEXEC)
            with ExitStack() as on_error, os.fdopen(writing, "wb", 0):
                pipe = on_error.enter_context(os.fdopen(reading, "rb", 0))
                own, stdin = socket.socketpair()
                on_error.enter_context(own)
                with stdin:
                    self._send(request, [stdin.fileno(), writing, writing])
                on_error.pop_all()
        except OSError as error:
            raise SandboxError(f"no process can be started in a sandbox: {error}") from error
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
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


def _end(control: socket.socket, pidfd: int) -> None:
    control.close()
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)


def _discard(forking: asyncio.Future[tuple[socket.socket, int]]) -> None:
    """End a sandbox that nobody waits for any more."""
    if not forking.cancelled() and forking.exception() is None:
        _end(*forking.result())
