"""Records which task each process of a reward worker executes.

Dask knows which tasks a dead worker had, but most of them only waited. So each process writes the
key of every task that it begins to a file of its own, in a folder that workers and driver share.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Execution:
    """The last task of one process."""

    key: str = ""
    """Empty while it executes none."""
    num_ended: int = 0
    """Tasks that the process has ended."""


class Executions:
    """The files of all processes of one driver's life."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, process: str, execution: Execution) -> None:
        (self._folder / process).write_text(f"{execution.num_ended} {execution.key}")

    def last(self, process: str) -> Execution:
        with suppress(OSError, ValueError):
            num_ended, _, key = (self._folder / process).read_text().partition(" ")
            return Execution(key, int(num_ended))
        return Execution()

    def num_ends(self, key: str) -> int:
        """Return how many processes ended while they executed a task.

        Args:
            key: the beginning of its keys; it does not run now.
        """
        processes = list(self._folder.glob("*"))
        return sum(self.last(process.name).key.startswith(key) for process in processes)
