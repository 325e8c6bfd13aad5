"""Trajectory ids in, what training needs of them out: how a trainer rank reads the log.

A row that is not what was written, by its `content_hash`, trains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_flow.errors import StorageError
from areal_flow.store.trajectories import TrajectoryReader
from schemas import content_hash_mismatches
from schemas.content import CONTENT_COLUMNS


class TrainingRows:
    """Reads trajectories in the order asked for; opens the log on first use."""

    COLUMNS = ("submission_index", *CONTENT_COLUMNS, "content_hash")

    def __init__(self, trajectories: Path, writers: Path) -> None:
        self._paths = trajectories, writers
        self._reader: TrajectoryReader | None = None

    def __call__(self, trajectory_ids: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        """Return the rows.

        Raises:
            StorageError: an id is not in the log, or its row was changed.
        """
        if self._reader is None:
            self._reader = TrajectoryReader(*self._paths)
        table = self._reader.read(trajectory_ids, self.COLUMNS)
        for identifier, expected, found in content_hash_mismatches(table):
            raise StorageError(
                f"trajectory {identifier} is not what was written: expected content_hash "
                f"{expected}, found {found}. Restore {self._paths[0].name} from a copy"
            )
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows
