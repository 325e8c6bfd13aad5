"""Held-out answers: appended a whole evaluation at a time, by the driver that holds the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa

from areal_flow.recovery.lease import Writer
from areal_flow.store.dataset import (
    all_of,
    create_dataset,
    open_dataset,
    storage_errors,
    that_count,
)
from schemas import EvaluationRow, arrow_schema, validate

EVALUATIONS = arrow_schema(EvaluationRow)


def append_evaluation(path: Path, rows: Sequence[dict[str, Any]], writer: Writer) -> None:
    """Validate and append; the dataset is made on first use.

    Raises:
        RunError: another driver took over; this one must end.
        SchemaError, StorageError: nothing was written.
    """
    table = validate(pa.Table.from_pylist(list(rows), schema=EVALUATIONS), EvaluationRow)
    writer.check_current()
    if not path.exists():
        create_dataset(path, EVALUATIONS, stable_row_ids=True)
    with storage_errors(path):
        lance.write_dataset(table, str(path), mode="append")


def read_evaluation(path: Path, writers: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows of an evaluation, those that count; none if it was never made."""
    if not path.is_dir():
        return []
    condition = all_of(f"evaluation = '{name}'", that_count(path, writers))
    rows: list[dict[str, Any]] = open_dataset(path).to_table(filter=condition).to_pylist()
    return rows
