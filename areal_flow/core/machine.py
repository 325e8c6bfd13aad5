"""What this machine gives a process: cores, memory, open files, and the one GPU by turns."""

from __future__ import annotations

import asyncio
import fcntl
import os
import platform
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where a container says how much memory it may use, in versions 2 and 1."""

MAX_OPEN_FILES = 65_536
"""More than 10,000 workers need."""


def is_linux() -> bool:
    """Return whether sandboxes, shared memory and parent-death signals can be had."""
    return sys.platform == "linux"


def system_name() -> str:
    """Return system and processor in words, such as `Linux x86_64`."""
    return f"{platform.system()} {platform.machine()}"


def usable_cores() -> int:
    """Return how many cores this process may use; where only Linux knows, how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_bytes() -> int:
    allowed = [psutil.virtual_memory().total]
    for file in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # it does not exist, or says "max"
            allowed.append(int(file.read_text()))
    return int(min(allowed))


def raise_open_files_limit() -> int:
    """Allow this process and its children to open more files; return how many, at most.

    The soft limit is 1024 on most systems, for programs that use `select`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError):  # macOS has a lower limit, which it does not say
        return soft
    return target


ALONE, TOGETHER = fcntl.LOCK_EX, fcntl.LOCK_SH
POLL_S = 0.05


@asynccontextmanager
async def gpu_lock(processes: Path, kind: int) -> AsyncIterator[None]:
    """Hold the lock of the one GPU of a run whose trainer and generators take turns.

    It stands in the folder of a driver's processes. The driver holds it `ALONE` for the trainer's
    turn, so that its death ends the turn. Generators hold it `TOGETHER`, each while it allocates
    memory of the GPU: a new one waits without being told to.
    """
    with (processes / "gpu").open("a+") as file:
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(POLL_S)
        yield
