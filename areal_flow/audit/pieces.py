"""The rows of a stored dataset, a bounded number at a time: what cannot be read is said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from areal_flow.errors import ArealFlowError
from areal_flow.store.dataset import COMMIT_ORDER, open_dataset, read_errors

ROWS_AT_ONCE = 256
BYTES_AT_ONCE = 16 * 2**20
"""Rows that are judged together: judging costs the same for one row and for many."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one or more fragments, with their commit order as `_rowid`; or why there are none."""

    source: str
    rows: pa.Table | None = None
    error: str = ""


def scan(path: Path, where: str | None = None) -> Iterator[Piece]:
    """Yield the newest version's rows that meet `where`, about `BYTES_AT_ONCE` in a piece."""
    sources: list[str] = []
    tables: list[pa.Table] = []
    for piece in _scan(path, where):
        if piece.rows is None:
            yield piece
            continue
        sources.append(piece.source)
        tables.append(piece.rows)
        if sum(table.nbytes for table in tables) >= BYTES_AT_ONCE:
            yield _together(sources, tables)
            sources, tables = [], []
    if tables:
        yield _together(sources, tables)


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


def _together(sources: Sequence[str], tables: Sequence[pa.Table]) -> Piece:
    first, last = sources[0], sources[-1]
    source = first if first == last else f"{first} to {last.rsplit(' ', 1)[-1]}"
    return Piece(source, pa.concat_tables(tables))
