"""Stored rows, read a bounded number at a time, and judged by their schema."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pandera.polars as pa_polars
import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.core.errors import ArealFlowError
from areal_flow.log.audit.findings import ADVICE, Finding, unreadable
from areal_flow.log.dataset import COMMIT_ORDER, has_version, open_dataset, read_errors
from schemas import arrow_schema, violations

ROWS_AT_ONCE = 256
BYTES_AT_ONCE = 16 * 2**20
"""Rows that are judged together: judging costs the same for one row and for many."""


class VersionGone(Exception):
    """The version that was being read was cleaned up: the run commits faster than it is read."""


class Batch(NamedTuple):
    source: str
    rows: pa.Table


def scan(path: Path, where: str | None = None) -> Iterator[Batch | Finding]:
    """Yield rows of the newest version, about `BYTES_AT_ONCE` together, or findings."""
    read: list[Batch] = []
    for batch in _batches(path, where):
        if isinstance(batch, Finding):
            yield batch
            continue
        read.append(batch)
        if sum(batch.rows.nbytes for batch in read) >= BYTES_AT_ONCE:
            yield _together(read)
            read = []
    if read:
        yield _together(read)


def _batches(path: Path, where: str | None) -> Iterator[Batch | Finding]:
    try:
        with read_errors(path):
            dataset = open_dataset(path)
            fragments = dataset.get_fragments()
    except ArealFlowError as error:
        yield unreadable(path.name, error)
        return
    for fragment in fragments:
        source = f"{path.name}, fragment {fragment.fragment_id}"
        columns = [*fragment.schema.names, COMMIT_ORDER]
        try:
            with read_errors(path):
                for batch in fragment.to_batches(
                    columns=columns, filter=where, batch_size=ROWS_AT_ONCE
                ):
                    yield Batch(source, pa.Table.from_batches([batch]))
        except ArealFlowError as error:
            if not has_version(path, dataset.version):
                raise VersionGone(path.name) from error
            yield unreadable(source, error)


def _together(read: list[Batch]) -> Batch:
    first, last = read[0].source, read[-1].source
    source = first if first == last else f"{first} to {last.rsplit(' ', 1)[-1]}"
    return Batch(source, pa.concat_tables([batch.rows for batch in read]))


def check_schema(
    batch: Batch, model: type[pa_polars.DataFrameModel], *, kind: str
) -> tuple[list[Finding], pa.Table | None]:
    """Return findings of broken rules, and the rows if rules over them can be computed."""
    stored, schema = batch.rows.drop_columns([COMMIT_ORDER]), arrow_schema(model)
    if odd := sorted(set(schema.names) ^ set(stored.schema.names)):
        broken = [f"missing or unknown columns: {', '.join(odd)}"]
    else:
        broken = violations(stored, model)
    expected, advice = f"rows of {model.__name__}", ADVICE[kind]
    findings = [Finding("schema", batch.source, expected, rule, advice) for rule in broken]
    try:
        rows = stored.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError, KeyError):
        return findings, None
    if odd or any(_has_holes(rows[field.name], field) for field in schema):
        return findings, None
    return findings, rows.append_column(COMMIT_ORDER, batch.rows[COMMIT_ORDER])


def _has_holes(column: pa.ChunkedArray, field: pa.Field) -> bool:
    if not field.nullable and column.null_count:
        return True
    return pa.types.is_list(field.type) and bool(pc.list_flatten(column).null_count)
