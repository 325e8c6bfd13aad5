"""Which trajectories, in which order: a condition and a column in, ids or rows out.

Ids first, rows after: a condition and an order read only the columns that they name, and texts are
decoded for the rows that are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.errors import ConfigError

ROWS_PER_BATCH = 512
QUOTE = "'"


@dataclass(frozen=True, slots=True)
class Selection:
    """Trajectories that satisfy `where`, by `sort` (nulls last), else by id; at most `limit`."""

    where: str | None = None
    sort: str | None = None
    descending: bool = False
    limit: int | None = None

    @property
    def condition(self) -> str:
        return f"(\n{self.where}\n)" if self.where else "TRUE"

    @property
    def order(self) -> str:
        direction = "DESC" if self.descending else "ASC"
        if self.sort is None:
            return f"ORDER BY trajectory_id {direction}"
        return f'ORDER BY "{self.sort}" {direction} NULLS LAST, trajectory_id'


def count_trajectories(database: duckdb.DuckDBPyConnection, selection: Selection) -> int:
    """Return how many trajectories satisfy the condition, whatever the limit.

    Raises:
        ConfigError: the condition or the order cannot be read; names the columns there are.
    """
    if selection.sort is not None and selection.sort not in column_names(database):
        raise ConfigError(f"--sort {selection.sort}: no such column. {_columns(database)}")
    query = f"SELECT count(*) FROM trajectories WHERE {selection.condition}"
    with _clear_errors(database, selection):
        return int(database.sql(query).fetchall()[0][0])


def select_ids(database: duckdb.DuckDBPyConnection, selection: Selection) -> list[str]:
    """Return the ids of the selected trajectories, in order; errors as `count_trajectories`."""
    limit = "" if selection.limit is None else f"LIMIT {selection.limit}"
    query = (
        f"SELECT trajectory_id FROM trajectories WHERE {selection.condition} "
        f"{selection.order} {limit}"
    )
    with _clear_errors(database, selection):
        return [identifier for (identifier,) in database.sql(query).fetchall()]


def read_rows(
    database: duckdb.DuckDBPyConnection,
    identifiers: Sequence[str],
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Return these trajectories' columns, or all of them, in this order."""
    names = "*" if columns is None else ", ".join(dict.fromkeys(["trajectory_id", *columns]))
    wanted = ", ".join(f"'{identifier.replace(QUOTE, QUOTE * 2)}'" for identifier in identifiers)
    found = database.sql(
        f"SELECT {names} FROM trajectories WHERE trajectory_id IN ({wanted or 'NULL'})"
    ).to_arrow_table()
    order = pc.index_in(pa.array(identifiers, pa.string()), value_set=found["trajectory_id"])
    return found.take(order)


def stream_rows(
    database: duckdb.DuckDBPyConnection, identifiers: Sequence[str]
) -> Iterator[pa.Table]:
    """Yield every column of these trajectories, a bounded number of rows at a time."""
    for start in range(0, len(identifiers), ROWS_PER_BATCH):
        yield read_rows(database, identifiers[start : start + ROWS_PER_BATCH])


def column_names(database: duckdb.DuckDBPyConnection) -> list[str]:
    """Return the columns of the `trajectories` view."""
    return [row[0] for row in database.sql("DESCRIBE trajectories").fetchall()]


@contextmanager
def _clear_errors(database: duckdb.DuckDBPyConnection, selection: Selection) -> Iterator[None]:
    try:
        yield
    except duckdb.Error as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"--where {selection.where!r} is no condition over trajectories: {reason}\n"
            f"{_columns(database)}"
        ) from None


def _columns(database: duckdb.DuckDBPyConnection) -> str:
    return f"Columns are: {', '.join(sorted(column_names(database)))}"
