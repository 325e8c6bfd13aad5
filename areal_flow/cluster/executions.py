"""Which task each process of a reward worker executes, so that its end is laid to that task.

Dask knows which tasks a dead worker had, but most of them had only waited there. So a process
writes down the key of each task that it begins, in a file of its own. After its end the file says
which task ran. Workers and driver share the folder.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Execution:
    """What one process did last."""

    key: str = ""
    """The task that it executes; empty while it has none."""
    num_ended: int = 0
    """Tasks that it has ended."""


class Executions:
    """The files of all processes of one driver's life."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, process: str, execution: Execution) -> None:
        (self._folder / process).write_text(f"{execution.num_ended} {execution.key}")

    def last(self, process: str) -> Execution:
        """Return what a process did last; nothing if it never began a task."""
        with suppress(OSError, ValueError):
            num_ended, _, key = (self._folder / process).read_text().partition(" ")
            return Execution(key, int(num_ended))
        return Execution()

    def num_ends(self, key: str) -> int:
        """Return how many processes ended while they executed a task.

        Args:
            key: what its keys begin with; it is not running anywhere.
        """
        processes = list(self._folder.glob("*"))
        return sum(self.last(process.name).key.startswith(key) for process in processes)
