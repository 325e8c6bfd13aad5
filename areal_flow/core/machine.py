"""What this machine gives a process: cores and memory, whatever its system is."""

from __future__ import annotations

import os
import platform
import resource
import sys
from contextlib import suppress
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
