"""A run as a DuckDB connection: its tables as views, and the columns that follow from them.

Nothing is copied but ids: views read the datasets as they are queried, filters and projections
pushed down, and a derived column costs only the queries that use it. The views stand in `sql/`.

    trajectories   every stored column, and
        prompt, completion           decoded, special tokens left out; no completion where
                                     `log.keep_tokens_of` dropped its tokens
        status, step, reason           trained, discarded or waiting; by which step; why
        policy_version               that the step started from
        verdict                      the verifier's word
        passed                       whether the reward is above the recipe's `pass_threshold`
        num_tokens                   of the completion
        token_versions               the policy version that sampled each token
        num_trained_tokens           with gradient; null unless trained
        num_masked_tokens            too old for gradient, or not the policy's choice
        staleness                    mean over the trained tokens, in versions
        importance_weight_mean       over the trained tokens: their probability by the policy before
                                     the step over that when sampled; null where a later update of
                                     the step did not compute it
        importance_weight_max        the largest of them
    evaluations    every stored column, and `passed`
    steps, prompts
    indexed        trajectories without tokens and texts: what is fast to search (`Run.indexed`)
    logged         trajectories without what the ledger says of them: no step, status or staleness
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import duckdb
import pyarrow as pa

from areal_flow.core.pass_rates import PASS_THRESHOLD

TableFormat = Literal["pandas", "polars", "arrow", "duckdb"]

Decode = Callable[[pa.Array], pa.Array]
"""Turns a column of token ids into a column of texts."""

_OPEN = WeakSet[duckdb.DuckDBPyConnection]()

LEDGER_COLUMNS = (
    *("step", "policy_version", "trajectory_ids", "discarded"),
    *("importance_weight_means", "importance_weight_maxima"),
)
"""All of the ledger that `consumption_table` needs to be read."""

CONSUMPTION_COLUMNS = (
    *("trajectory_id", "writer_epoch", "status", "step", "policy_version", "reason"),
    *("importance_weight_mean", "importance_weight_max"),
)
"""All of `consumption_table`."""

LOG_COLUMNS = ("trajectory_id", "writer_epoch")
"""All of the log that `consumption_table` needs to be read."""


def read_sql(name: str, *, package: str = "areal_flow.log") -> str:
    return resources.files(package).joinpath("sql", f"{name}.sql").read_text()


def empty_database() -> duckdb.DuckDBPyConnection:
    """Return a database in memory, of times in UTC, that draws nothing on a terminal."""
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    # In a notebook without ipywidgets DuckDB has no bar, and refuses to hear of one.
    with suppress(duckdb.InvalidInputException):
        connection.execute("SET enable_progress_bar = false")
    return connection


def parquet_files(connection: duckdb.DuckDBPyConnection, files: Sequence[Path]) -> str:
    """Return files as a table of SQL, which `allow_reading_only` does not refuse."""
    names = ", ".join(map(quoted, files))
    connection.execute(f"SET allowed_paths = [{names}]")
    return f"read_parquet([{names}])"


def quoted(text: object) -> str:
    """Return a text as an SQL literal."""
    return "'" + str(text).replace("'", "''") + "'"


def allow_reading_only(connection: duckdb.DuckDBPyConnection) -> None:
    """Refuse networks, objects of this process, other settings and other files than those of
    `parquet_files`, from now on."""
    connection.execute("SET python_enable_replacements = false")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def convert(table: pa.Table, format: TableFormat) -> Any:
    match format:
        case "arrow":
            return table
        case "pandas":
            import pandas as pd

            return table.to_pandas(types_mapper=pd.ArrowDtype)
        case "polars":
            import polars as pl

            return pl.from_arrow(table)
        case "duckdb":
            return empty_database().from_arrow(table)
        case _:
            raise ValueError(f"expected pandas, polars, arrow or duckdb, found {format!r}")


def convert_relation(relation: duckdb.DuckDBPyRelation, format: TableFormat) -> Any:
    """Return a relation's rows; the relation itself, which reads them later, as "duckdb"."""
    return relation if format == "duckdb" else convert(relation.to_arrow_table(), format)


def consumption_table(steps: pa.Table, log: pa.Table) -> pa.Table:
    """Return what became of each trajectory of the log, one row each, in its order.

    Found by columns, so that a long past costs no memory: of most rows only ids are read.
    """
    log = log.select(LOG_COLUMNS).append_column("position", pa.array(range(len(log)), pa.int64()))
    with empty_database() as connection:
        connection.register("steps", steps.select(LEDGER_COLUMNS))
        connection.register("log", log)
        connection.execute(read_sql("consumed"))
        return connection.sql(read_sql("consumption")).to_arrow_table()


def connect(
    tables: Mapping[str, Any],
    *,
    decode: Decode,
    max_staleness: int,
    pass_threshold: float = PASS_THRESHOLD,
) -> duckdb.DuckDBPyConnection:
    connection = empty_database()
    _OPEN.add(connection)
    # DuckDB takes an Arrow dataset for one row and would build hash tables from payloads: joins
    # stay as they are written, the small side on the right.
    connection.execute("SET disabled_optimizers = 'join_order,build_side_probe_side'")
    for name, table in tables.items():
        connection.register(name, table)
    connection.create_function("decode_tokens", decode, ["INTEGER[]"], "VARCHAR", type="arrow")
    connection.execute(f"CREATE MACRO max_staleness() AS {max_staleness}")
    connection.execute(f"CREATE MACRO pass_threshold() AS {pass_threshold}::DOUBLE")
    connection.execute(read_sql("tokens") + read_sql("passing") + read_sql("logged"))
    for table, view in (("consumption", "trajectories"), ("stored_evaluations", "evaluations")):
        if table in tables:
            connection.execute(read_sql(view))
    return connection


def compared_answers(answers: pa.Table, *, pass_threshold: float) -> list[dict[str, Any]]:
    """Return held-out answers of the first evaluation beside those of the last, by difficulty.

    Two prompts of each of the first eight difficulties; only evaluations with the last one's
    verifier count, and only if two policies answered.
    """
    with empty_database() as connection:
        connection.register("answers", answers)
        connection.execute(read_sql("passing"))
        result = connection.sql(read_sql("compared"), params={"threshold": pass_threshold})
        rows: list[dict[str, Any]] = result.to_arrow_table().to_pylist()
    return rows


@atexit.register
def _close_all() -> None:
    for connection in list(_OPEN):
        connection.close()
