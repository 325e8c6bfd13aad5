"""Held-out answers: appended a whole evaluation at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa

from areal_flow.store.dataset import create_dataset, storage_errors
from schemas import EvaluationRow, arrow_schema, validate

EVALUATIONS = arrow_schema(EvaluationRow)


def append_evaluation(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Validate and append; the dataset is made on first use.

    Raises:
        SchemaError, StorageError: nothing was written.
    """
    table = validate(pa.Table.from_pylist(list(rows), schema=EVALUATIONS), EvaluationRow)
    if not path.exists():
        create_dataset(path, EVALUATIONS)
    with storage_errors(path):
        lance.write_dataset(table, str(path), mode="append")
