"""What this machine gives a process: cores and memory, whatever its system is."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

import psutil

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where a container says how much memory it may use, in versions 2 and 1."""


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
