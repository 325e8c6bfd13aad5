"""Worker processes that are started before there is a scheduler, and import meanwhile.

What a trainer imports takes as long as the preparation of a run. So its process is started first,
beside the preparation, and told its scheduler on its standard input. One that nobody takes is
killed: it has done nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from areal_flow.cluster.launchers.child import environment_of, start_process
from areal_flow.cluster.placement import THIS_MACHINE, WORKER_PROGRAM, WorkerPlacement


@dataclass(frozen=True, slots=True)
class Waiting:
    """A process that waits to be told its options: any worker's of this role and environment."""

    role: str
    environment: dict[str, str]
    process: subprocess.Popen[bytes]


class StandbyWorkers:
    """Processes that were started for placements on this machine."""

    def __init__(self, placements: Iterable[WorkerPlacement] = ()) -> None:
        self._waiting: list[Waiting] = []
        for placement in placements:
            if placement.host != THIS_MACHINE:
                continue
            command = [sys.executable, *WORKER_PROGRAM, placement.role, str(os.getpid())]
            with suppress(OSError):  # its launcher will say so
                process = start_process(command, placement)
                self._waiting.append(Waiting(placement.role, environment_of(placement), process))

    def take(self, placement: WorkerPlacement, options: str) -> subprocess.Popen[bytes] | None:
        """Return a process as this placement needs it, told these options, if one still runs."""
        role, environment = placement.role, environment_of(placement)
        for found in [*self._waiting]:
            if (found.role, found.environment) == (role, environment):
                self._waiting.remove(found)
                assert found.process.stdin is not None
                with suppress(OSError):
                    found.process.stdin.write(f"{options}\n".encode())
                    return found.process
        return None

    def close(self) -> None:
        """Kill those that nobody took."""
        for waiting in self._waiting:
            with waiting.process as process:
                process.kill()


@contextmanager
def standing_by(placements: Iterable[WorkerPlacement]) -> Iterator[StandbyWorkers]:
    """Have a process for each placement until a launcher takes it."""
    standby = StandbyWorkers(placements)
    try:
        yield standby
    finally:
        standby.close()
