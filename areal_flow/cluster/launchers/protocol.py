"""How the process of a placed worker starts, ends and is asked whether it lives.

A launcher knows neither roles nor quarantine: whether a process that ended is started again is the
pool's decision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from areal_flow.cluster.placement import WorkerPlacement

OnExit = Callable[[str], None]
"""Called in the event loop once a process has ended, with the cause in words."""


class Launcher(Protocol):
    """Starts and ends worker processes, each known by the name in its placement."""

    async def start(self, placement: WorkerPlacement, on_exit: OnExit) -> None:
        """Start the process of a worker that has none; return before it has joined the scheduler.

        Args:
            placement: its name, host, environment, threads and resources.
            on_exit: called once if the process ends before `stop` was called for it.

        Raises:
            EngineError: no process was started.
        """
        ...

    def kill(self, name: str) -> bool:
        """End a process that may hang, by force; return whether there was one."""
        ...

    async def stop(self, name: str) -> None:
        """End a process, by force only where it takes too long; return when it has ended."""
        ...

    def pid(self, name: str) -> int | None:
        """Return the number of a process that runs, if it is one of this machine."""
        ...
