"""A dataset in, its rows out in pieces, for audits: what cannot be read is said, not raised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from areal_flow.errors import ArealFlowError
from areal_flow.store.dataset import COMMIT_ORDER, open_dataset, read_errors

ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one fragment, with their commit order as `_rowid`; or why there are none."""

    source: str
    rows: pa.Table | None = None
    error: str = ""


def scan(path: Path, where: str | None = None) -> Iterator[Piece]:
    """Yield the newest version's rows that meet `where`, `ROWS_AT_ONCE` at most in a piece."""
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
