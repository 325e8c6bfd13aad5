"""The step ledger: one row a step, in order, each naming the row before it by hash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from areal_flow.errors import RunError, StorageError
from areal_flow.store.dataset import (
    DurableDirectory,
    compact,
    create_dataset,
    open_dataset,
    storage_errors,
)
from schemas import StepRow, arrow_schema

STEPS = arrow_schema(StepRow, primary_key="step")
APPENDS_BETWEEN_MAINTENANCE = 50


def create_ledger(path: Path) -> None:
    """Create the empty ledger of a new run."""
    create_dataset(path, STEPS)


class Ledger:
    """Appends and reads step rows.

    Rows are ours, one a step, and checked against the Arrow schema on their way in; pandera's check
    of the whole table costs more than a small step and belongs to tests and audits.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._dataset = open_dataset(path)
        self._durable = DurableDirectory(path)
        self._num_appends = 0

    def append(self, row: dict[str, Any]) -> None:
        """Commit one row.

        Raises:
            RunError: another writer committed this step first; this one must end.
            StorageError: nothing was written.
        """
        table = pa.Table.from_pylist([row], schema=STEPS)
        with storage_errors(self._path):
            counts = self._dataset.merge_insert("step").when_not_matched_insert_all().execute(table)
        if counts["num_inserted_rows"] != 1:
            raise RunError(
                f"step {row['step']} is in the ledger already: another driver wrote it, "
                "and this one must stop"
            )
        self._num_appends += 1
        if self._num_appends % APPENDS_BETWEEN_MAINTENANCE == 0:
            compact(self._dataset)

    def rows(self, columns: list[str] | None = None) -> list[dict[str, Any]]:
        """Return the rows, by step.

        Raises:
            StorageError: a step is missing between the first and the last.
        """
        self._dataset.checkout_latest()
        rows: list[dict[str, Any]] = self._dataset.to_table(columns=columns).to_pylist()
        if columns is None or "step" in columns:
            rows.sort(key=lambda row: row["step"])
            steps = [row["step"] for row in rows]
            if steps != list(range(len(steps))):
                raise StorageError(f"expected steps 0 to {len(steps) - 1} in {self._path}")
        return rows

    def head(self, columns: list[str]) -> dict[str, Any]:
        """Return these columns of the newest row."""
        return self.rows(["step", *columns])[-1]

    def sync(self) -> None:
        """Force everything committed to disk."""
        self._durable.sync()
