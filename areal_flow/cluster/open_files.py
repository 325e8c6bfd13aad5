"""How many files a driver opens for its workers; it refuses too many before it starts one."""

from __future__ import annotations

from areal_flow.core.errors import ConfigError
from areal_flow.core.machine import raise_open_files_limit

DRIVER_OPEN_FILES = 256
"""Of the driver itself: libraries, logs, the dashboard, files of a commit."""
CONNECTIONS_PER_WORKER = 5
"""Tasks, heartbeats, a broadcast, and two of the worker's own client, by which episodes score."""


def allow_open_files(num_workers: int, *, files_per_worker: int) -> None:
    """Raise this process's soft limit of open files, or refuse workers beyond its hard limit.

    Args:
        files_per_worker: what the launcher keeps open, such as pipes.
    """
    each = CONNECTIONS_PER_WORKER + files_per_worker
    needed, limit = DRIVER_OPEN_FILES + each * num_workers, raise_open_files_limit()
    if needed > limit:
        fitting = max(0, limit - DRIVER_OPEN_FILES) // each
        raise ConfigError(
            f"a driver of {num_workers} workers opens up to {needed} files "
            f"({DRIVER_OPEN_FILES} + {each} a worker), and this process may open {limit}: raise "
            "its hard limit (nofile in /etc/security/limits.conf, LimitNOFILE of systemd, "
            f"--ulimit nofile of docker), or start at most {fitting} workers"
        )
