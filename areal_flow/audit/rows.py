"""Stored rows, read a bounded number at a time, and judged by rules that are no query."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandera.polars as pa_polars
import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.audit.findings import ADVICE, Finding
from areal_flow.controller.records import member_seed
from areal_flow.errors import ArealFlowError
from areal_flow.store.dataset import COMMIT_ORDER, open_dataset, read_errors
from schemas import arrow_schema, content_hash_mismatches, violations

ROWS_AT_ONCE = 256
BYTES_AT_ONCE = 16 * 2**20
"""Rows that are judged together: judging costs the same for one row and for many."""
_PROMPT_COLUMNS = ("prompt_id", "difficulty", "prompt_tokens")


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one or more fragments, with their commit order as `_rowid`; or why there are none."""

    source: str
    rows: pa.Table | None = None
    error: str = ""


def scan(path: Path, where: str | None = None) -> Iterator[Piece]:
    """Yield the newest version's rows that meet `where`, about `BYTES_AT_ONCE` in a piece."""
    read: list[tuple[str, pa.Table]] = []
    for piece in _scan(path, where):
        if piece.rows is None:
            yield piece
            continue
        read.append((piece.source, piece.rows))
        if sum(table.nbytes for _, table in read) >= BYTES_AT_ONCE:
            yield _together(read)
            read = []
    if read:
        yield _together(read)


def _scan(path: Path, where: str | None) -> Iterator[Piece]:
    try:
        with read_errors(path):
            fragments = open_dataset(path).get_fragments()
    except ArealFlowError as error:
        yield Piece(path.name, error=str(error))
        return
    for fragment in fragments:
        yield from _scan_fragment(path, fragment, where)


def _scan_fragment(path: Path, fragment: Any, where: str | None) -> Iterator[Piece]:
    source = f"{path.name}, fragment {fragment.fragment_id}"
    columns = [*fragment.schema.names, COMMIT_ORDER]
    try:
        with read_errors(path):
            batches = fragment.to_batches(columns=columns, filter=where, batch_size=ROWS_AT_ONCE)
            for batch in batches:
                yield Piece(source, rows=pa.Table.from_batches([batch]))
    except ArealFlowError as error:
        yield Piece(source, error=str(error))


def _together(read: Sequence[tuple[str, pa.Table]]) -> Piece:
    first, last = read[0][0], read[-1][0]
    source = first if first == last else f"{first} to {last.rsplit(' ', 1)[-1]}"
    return Piece(source, pa.concat_tables([table for _, table in read]))


def conform(table: pa.Table, model: type[pa_polars.DataFrameModel]) -> pa.Table | None:
    """Return the schema's columns in its types; None where columns, types or values are missing.

    What is returned can be computed with; whether each row satisfies the model is another question.
    """
    schema = arrow_schema(model)
    if sorted(table.schema.names) != sorted(schema.names):
        return None
    try:
        cast = table.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError):
        return None
    return None if any(_has_holes(cast[field.name], field) for field in schema) else cast


def check_schema(
    table: pa.Table, model: type[pa_polars.DataFrameModel], *, where: str, kind: str
) -> Iterator[Finding]:
    """Yield one finding for each column and rule that the rows break.

    Args:
        kind: of what is damaged then, as in `ADVICE`.
    """
    advice = ADVICE[kind]
    expected = f"rows of {model.__name__}"
    wanted, found = set(arrow_schema(model).names), set(table.schema.names)
    if wanted != found:
        odd = ", ".join(sorted(wanted ^ found))
        yield Finding("schema", where, expected, f"missing or unknown columns: {odd}", advice)
        return
    for broken in violations(table, model):
        yield Finding("schema", where, expected, broken, advice)


def check_contents(table: pa.Table) -> Iterator[Finding]:
    """Yield trajectories that are not what was written."""
    for identifier, expected, found in content_hash_mismatches(table):
        yield Finding("content-hash", identifier, expected, found, ADVICE["log"])


def check_seeds(table: pa.Table, *, run_seed: int) -> Iterator[Finding]:
    """Yield trajectories whose seed does not follow from run, submission and member."""
    names = ("trajectory_id", "submission_index", "member", "seed")
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    for identifier, index, member, seed in rows:
        expected = member_seed(run_seed, index, member)
        if seed != expected:
            yield Finding("seed", identifier, str(expected), str(seed), ADVICE["log"])


def check_prompts(table: pa.Table, prompts: pa.Table) -> Iterator[Finding]:
    """Yield trajectories whose prompt is not that of their submission.

    Args:
        prompts: the prompt table's rows for the same submissions, in the same order.
    """
    for name in _PROMPT_COLUMNS:
        found = table[name].combine_chunks()
        expected = prompts[name].combine_chunks().cast(found.type)
        if found.equals(expected):
            continue
        for row, identifier in enumerate(table["trajectory_id"].to_pylist()):
            if not found.slice(row, 1).equals(expected.slice(row, 1)):
                wanted = f"{name} of the prompt table at its submission"
                yield Finding("prompt", identifier, wanted, "another", ADVICE["log"])


def _has_holes(column: pa.ChunkedArray, field: pa.Field) -> bool:
    if not field.nullable and column.null_count:
        return True
    return pa.types.is_list(field.type) and bool(pc.list_flatten(column).null_count)
