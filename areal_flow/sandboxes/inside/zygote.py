"""A process that is prepared once and forked for each run: modules imported, files out of reach.

It reads requests from a socket: a line of JSON, and the descriptors of the run. It never reads
from these: its memory is copied into every run. Over the socket of a run it sends a descriptor of
the process when that has started, and its exit status and times when it has ended.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from . import first, kernel, program, seccomp, testing, tiers

MODULES = (
    "abc", "array", "ast", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime",
    "decimal", "enum", "fractions", "functools", "heapq", "io", "itertools", "json", "math",
    "operator", "os", "queue", "random", "re", "statistics", "string", "sys", "threading", "time",
    "traceback", "types", "typing", "unittest",
)  # fmt: skip
"""Imported before any run, since programs often use them."""
TASKS: dict[str, Callable[[], Any]] = {
    program.SCRIPT: program.run_source,
    program.LEND: program.lend,
    program.TEST: testing.test,
}
COMMANDS = "commands"
"""The mode of a sandbox that runs commands, for as long as its owner wants."""
NO_RUN = -1
MAX_DESCRIPTORS = 16
NOBODY_BASE = 1_000_000_000
"""Without namespaces a run started by root gets its own user: this plus its process id."""


class Zygote:
    """Forks a confined process for each request.

    | who        | waits for              | unblocked by                      |
    |------------|------------------------|-----------------------------------|
    | the zygote | a request, a run's end | its owner, whose end is its own; a run |
    """

    def __init__(self, control: socket.socket, settings: Mapping[str, Any]) -> None:
        """Confine this process by its tier; with namespaces a child process continues."""
        self._control = control
        self._namespaces: tiers.Namespaces | None = None
        self._ruleset = -1
        may_truncate = True
        self._is_root = os.getuid() == 0
        readable, devices = settings["readable"], settings["devices"]
        if settings["tier"] == tiers.NAMESPACES:
            self._namespaces = tiers.enter(readable, devices)
        else:
            self._ruleset = tiers.make_ruleset(readable, devices)
            may_truncate = tiers.refuses_truncation()
        self._pid = os.getpid()
        self._filter = seccomp.filter_program(may_truncate=may_truncate)
        self._runs: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> None:
        """Serve requests until the owner is gone."""
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd in self._runs:
                    poller.unregister(fd)
                    self._reap(fd)
                elif (pidfd := self._next_run()) is None:
                    return
                elif pidfd != NO_RUN:
                    poller.register(pidfd, select.POLLIN)

    def _next_run(self) -> int | None:
        line, fds, _, _ = socket.recv_fds(self._control, 1024, MAX_DESCRIPTORS)
        if not line:
            return None
        request, reply = json.loads(line), socket.socket(fileno=fds[0])
        try:
            if self._namespaces:
                self._namespaces.prepare_fork()
            if (pid := os.fork()) == 0:
                self._become(request, fds)
        except OSError as error:  # too many processes; others go on
            os.write(fds[3], f"{type(error).__name__}: {error}".encode())
            reply.close()
            return NO_RUN
        finally:
            for fd in fds[1:]:
                os.close(fd)
        pidfd = os.pidfd_open(pid)
        self._runs[pidfd] = pid, reply
        _send(reply, b"{}", [pidfd])
        return pidfd

    def _reap(self, pidfd: int) -> None:
        pid, reply = self._runs.pop(pidfd)
        _, status, usage = os.wait4(pid, 0)
        cpu_s = usage.ru_utime + usage.ru_stime
        code = os.waitstatus_to_exitcode(status)
        _send(reply, json.dumps({"exit_code": code, "cpu_s": cpu_s}).encode())
        reply.close()
        os.close(pidfd)

    def _become(self, request: Mapping[str, Any], fds: list[int]) -> None:
        """Turn this fork into the run; never returns.

        It reports that it is confined over a descriptor that it then closes.
        """
        try:
            os.setsid()
            kept = self._namespaces.proc if self._namespaces else self._ruleset
            reply = _place_descriptors(fds, kept)
            if request["mode"] == COMMANDS:
                self._confine_commands(request)
            else:
                self._confine(request)
            os.write(reply, b"confined")
            os.close(reply)
        except BaseException as error:  # noqa: BLE001 - nothing above could handle it
            os.write(2, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        if request["mode"] == COMMANDS:
            first.serve(memory_bytes=request["memory_bytes"])
        program.run(TASKS[request["mode"]], imports=request["imports"])

    def _confine(self, request: Mapping[str, Any]) -> None:
        if self._namespaces:
            self._namespaces.confine()
        else:
            self._without_namespaces()
        counts_threads = self._is_root or self._namespaces is not None
        _limit(request, disk_bytes=tiers.SCRATCH_BYTES, counts_threads=counts_threads)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if not self._namespaces and os.getppid() != self._pid:
            raise ProcessLookupError("the zygote has ended")  # before PDEATHSIG was set
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if self._ruleset >= 0:
            tiers.restrict(self._ruleset)
            os.close(self._ruleset)
        kernel.install_filter(seccomp.with_own_pid(self._filter, os.getpid()))

    def _confine_commands(self, request: Mapping[str, Any]) -> None:
        if not self._namespaces:
            raise OSError("commands need user namespaces")
        disk_bytes = request["disk_bytes"]
        self._namespaces.confine_commands(disk_bytes=disk_bytes)
        _limit(request, disk_bytes=disk_bytes, counts_threads=True)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.install_filter(seccomp.filter_of_commands())

    def _without_namespaces(self) -> None:
        """If this is root, become an unused user who may read what root may.

        Landlock limits that. Python itself may be installed where only root can read it.
        """
        os.chdir("/")
        if self._is_root:
            user = NOBODY_BASE + os.getpid()
            os.setgroups([])
            kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            kernel.set_capabilities([kernel.CAP_DAC_READ_SEARCH])


def _limit(request: Mapping[str, Any], *, disk_bytes: int, counts_threads: bool) -> None:
    """Set the resource limits; that of threads only if no other processes count."""
    limits = {
        resource.RLIMIT_CPU: int(request["cpu_s"]) + 2,
        resource.RLIMIT_AS: request["memory_bytes"],
        resource.RLIMIT_FSIZE: disk_bytes,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if counts_threads:
        limits[resource.RLIMIT_NPROC] = request["num_threads"]
    for name, limit in limits.items():
        resource.setrlimit(name, (limit, limit))


def _place_descriptors(fds: list[int], kept: int) -> int:
    """Number the run's descriptors from 0, close all others, and return that of its socket."""
    reply, *own = [fcntl.fcntl(fd, fcntl.F_DUPFD, kernel.HIGH_DESCRIPTOR) for fd in fds]
    for number, fd in enumerate(own):
        os.dup2(fd, number)
    begin = len(own)
    for fd in sorted((reply, kept)):
        os.closerange(begin, fd)
        begin = fd + 1
    os.closerange(begin, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return reply


def _send(reply: socket.socket, message: bytes, fds: list[int] | None = None) -> None:
    try:
        socket.send_fds(reply, [message], fds or [])
    except OSError:
        return  # the owner no longer waits for this run


def main() -> None:
    """Serve a socket; the arguments are its descriptor and the settings as JSON."""
    settings = json.loads(sys.argv[2])
    control = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:] = [path for path in sys.path if path != settings["own_path"]]
    sys.path += settings["site"]
    for name in (*MODULES, *settings["modules"]):
        importlib.import_module(name)
    sys.argv[:] = [""]
    zygote = Zygote(control, settings)
    control.send(b"ready")
    gc.collect()
    gc.freeze()
    zygote.serve()
    os._exit(0)
