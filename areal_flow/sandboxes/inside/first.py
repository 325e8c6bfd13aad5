"""The first process of a sandbox for commands: starts processes, and ends them all.

It reads requests from a socket, a line of JSON each. Its end is the end of every process of the
sandbox, and comes with the end of the socket's other side.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from contextlib import suppress

from . import tiers

START, KILL = "start", "kill"
CHECK_EVERY_S = 0.5
"""How often memory is added up; a process alone is limited by the kernel."""
FORK_ATTEMPTS = 100
_OWN_MEMORY = ("RssAnon:", "VmSwap:")
CONTROL = 3
"""The socket's descriptor."""


def serve(*, memory_bytes: int) -> None:
    """Serve requests until the socket is closed, and kill all if they use too much memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's handler would end this process
    control = socket.socket(fileno=CONTROL)
    control.set_inheritable(False)
    poller = select.poll()
    poller.register(control, select.POLLIN)
    while True:
        is_ready = poller.poll(1000 * CHECK_EVERY_S)
        _reap()
        if is_ready:
            line, fds, _, _ = socket.recv_fds(control, 1 << 17, 3)
            if not line:
                os._exit(0)
            with suppress(ValueError):  # too long a line
                _handle(json.loads(line), fds)
            for fd in fds:
                os.close(fd)
        elif _used_bytes() > memory_bytes:
            _kill_all()


def _handle(request: dict[str, object], fds: list[int]) -> None:
    if request["do"] == KILL:
        _kill_all()
    elif _fork() == 0:
        try:
            os.setsid()
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
            # `serve` ignores the first one, Python the others.
            for ignored in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(ignored, signal.SIG_DFL)
            arguments, environment = request["arguments"], request["environment"]
            if workdir := str(request["workdir"]):
                with suppress(OSError):  # commands may have made it unusable
                    os.makedirs(workdir, exist_ok=True)
                    os.chdir(workdir)
            os.closerange(len(fds), 256)
            os.execvpe(arguments[0], arguments, environment)  # type: ignore[index,arg-type]
        except BaseException as error:  # noqa: BLE001 - nothing above could handle it
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(127)


def _fork() -> int:
    """Fork, and wait for processes that are ending where there are too many; else say so."""
    for _ in range(FORK_ATTEMPTS):
        with suppress(BlockingIOError):
            return os.fork()
        _reap()
        time.sleep(0.01)
    os.write(2, b"a sandbox has too many processes")
    return -1


def _kill_all() -> None:
    """Kill every other process of this pid namespace, and let the next ones use their folders."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    _reap()
    for path, mode in tiers.FOLDERS.items():
        with suppress(OSError):
            os.chmod(path, mode)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _used_bytes() -> int:
    """Return the memory of all processes, but for files; 0 without /proc."""
    total_kb = 0
    with suppress(FileNotFoundError):
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{pid}/status") as lines:
                used = [line.split() for line in lines if line.startswith(_OWN_MEMORY)]
                total_kb += sum(int(kilobytes) for _, kilobytes, _ in used)
    return 1024 * total_kb
