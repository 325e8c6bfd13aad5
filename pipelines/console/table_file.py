"""Writes tables to a new Parquet, JSONL or CSV file or a Lance dataset, a batch at a time."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from areal_flow.core.errors import ConfigError
from pipelines.console.tables import plain

LANCE = ".lance"


def check_table_file(path: Path) -> None:
    """Refuse a file that cannot be written."""
    endings = [*_WRITERS, LANCE]
    if path.suffix not in endings:
        raise ConfigError(f"--to {path}: expected a name that ends in {' or '.join(endings)}")
    if path.exists():
        raise ConfigError(f"--to {path}: there is such a file already; remove it or choose another")
    if not path.parent.is_dir():
        raise ConfigError(f"--to {path}: there is no folder {path.parent}")


def write_table_file(path: Path, tables: Iterable[pa.Table], schema: pa.Schema) -> int:
    """Write tables of one schema, by the file's ending; return the number of rows.

    A file that is being written has another name: one of this name is complete.
    """
    check_table_file(path)
    if path.suffix == LANCE:
        from areal_flow.log.dataset import create_dataset

        return int(create_dataset(path, schema, tables).count_rows())
    partial = path.with_name(f".{path.name}.partial")
    num_rows = 0
    try:
        with _WRITERS[path.suffix](partial, schema) as write:
            for table in tables:
                write(table)
                num_rows += len(table)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return num_rows


@contextmanager
def _parquet(path: Path, schema: pa.Schema) -> Iterator[Callable[[pa.Table], object]]:
    with pq.ParquetWriter(path, schema) as writer:
        yield lambda table: writer.write_table(table.cast(schema))


@contextmanager
def _jsonl(path: Path, _: pa.Schema) -> Iterator[Callable[[pa.Table], object]]:
    with path.open("w", encoding="utf-8") as file:
        yield lambda table: file.writelines(
            json.dumps(row, default=plain, ensure_ascii=False) + "\n" for row in table.to_pylist()
        )


@contextmanager
def _csv(path: Path, schema: pa.Schema) -> Iterator[Callable[[pa.Table], object]]:
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(schema.names)
        yield lambda table: rows.writerows(map(_cell, row.values()) for row in table.to_pylist())


def _cell(value: Any) -> Any:
    return json.dumps(value, default=plain) if isinstance(value, list | dict) else value


_WRITERS = {".parquet": _parquet, ".jsonl": _jsonl, ".csv": _csv}
