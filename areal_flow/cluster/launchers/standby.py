"""Worker processes that are started before there is a scheduler, and import meanwhile.

The imports of a trainer take as long as the preparation of a run. So its process starts first and
imports meanwhile; it reads its options from standard input. A process that nobody takes is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from areal_flow.cluster.launchers.child import start_process
from areal_flow.cluster.placement import THIS_MACHINE, WORKER_PROGRAM, WorkerPlacement


class StandbyWorkers:
    """Processes that were started for placements on this machine."""

    def __init__(self, placements: Iterable[WorkerPlacement] = ()) -> None:
        self._waiting: list[tuple[WorkerPlacement, subprocess.Popen[bytes]]] = []
        for placement in placements:
            if placement.host != THIS_MACHINE:
                continue
            command = [sys.executable, *WORKER_PROGRAM, placement.role, str(os.getpid())]
            with suppress(OSError):  # its launcher will say so
                self._waiting.append((placement, start_process(command, placement)))

    def take(self, placement: WorkerPlacement, options: str) -> subprocess.Popen[bytes] | None:
        """Send the options to a process for such a placement and return it, if one runs."""
        for waiting in [*self._waiting]:
            known, process = waiting
            if (known.role, known.environment) == (placement.role, placement.environment):
                self._waiting.remove(waiting)
                assert process.stdin is not None
                with suppress(OSError):
                    process.stdin.write(f"{options}\n".encode())
                    return process
        return None

    def close(self) -> None:
        for _, process in self._waiting:
            with process:
                process.kill()


@contextmanager
def standing_by(placements: Iterable[WorkerPlacement]) -> Iterator[StandbyWorkers]:
    standby = StandbyWorkers(placements)
    try:
        yield standby
    finally:
        standby.close()
