"""Groups of a run by a condition, and one group in full: each reads only what it shows.

A condition is evaluated over the log alone where it names nothing that the ledger says, and what
became of trajectories is read for the groups that are shown: a log may have millions of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from threading import Timer
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.core.errors import ConfigError, RunError
from areal_flow.core.types import submission_index_of
from areal_flow.log.browsing import ShownTrajectory, show_rows
from areal_flow.log.database import (
    LEDGER_COLUMNS,
    LOG_COLUMNS,
    allow_reading_only,
    consumption_table,
    empty_database,
    read_sql,
)
from areal_flow.log.dataset import fence_condition, open_dataset, read_rows
from areal_flow.log.queries import Run

ORDERS = {
    "newest": "submission_index DESC",
    "oldest": "submission_index",
    "lowest reward": "avg(reward) NULLS LAST, submission_index",
    "most unequal rewards": "stddev_pop(reward) DESC NULLS LAST, submission_index",
}
MOST_GROUPS = 50
MOST_SECONDS = 60
COLUMNS = "Columns are those that `areal-flow trajectories --help` lists"
_PROMPT = ("source", "prompt_id", "difficulty")
_MEMBER = (*LOG_COLUMNS, *_PROMPT, "submission_index", "reward", "version_spans")


@dataclass(frozen=True, slots=True)
class GroupSelection:
    """Groups with a trajectory that satisfies `where`, and that `step` trained, if it is given."""

    where: str | None = None
    step: int | None = None
    order: str = "newest"


def select_groups(run: Run, chosen: GroupSelection) -> tuple[list[dict[str, Any]], int]:
    """Return the first selected groups, and how many match."""
    query = (
        f"SELECT submission_index, count(*) OVER () FROM {{table}}\nWHERE {condition(run, chosen)}"
        f"\nGROUP BY submission_index ORDER BY {ORDERS[chosen.order]} LIMIT {MOST_GROUPS}"
    )
    try:
        selected = _ask(run, query)
    except duckdb.InterruptException:
        raise ConfigError(
            f"the condition {chosen.where} takes longer than {MOST_SECONDS} s: expected one that "
            "names fewer columns, or none of the ledger's"
        ) from None
    except duckdb.Error as error:
        why = f"{str(error).splitlines()[0]}. {COLUMNS}"
        raise ConfigError(f"expected an SQL condition, found {chosen.where}: {why}") from None
    indices = [index for index, _ in selected]
    members = read_rows(run.layout, "trajectories", _MEMBER, _one_of(indices))
    with empty_database() as database:
        database.register("members", members)
        database.register("prompts", run.prompts())
        database.register("consumption", _consumption_of(run, members))
        rows = database.sql(read_sql("groups")).to_arrow_table().to_pylist()
    by_index = {row["group"]: row for row in rows}
    return [by_index[index] for index in indices], selected[0][1] if selected else 0


def condition(run: Run, chosen: GroupSelection) -> str:
    where = f"(\n{chosen.where or 'TRUE'}\n)"
    if chosen.step is None:
        return where
    step = run.steps("arrow", columns=["trajectory_ids"], where=f"step = {chosen.step}")
    if not len(step):
        raise RunError(f"{run.layout.name} has no step {chosen.step}")
    trained = set(map(submission_index_of, step["trajectory_ids"][0].as_py()))
    return f"{where} AND {_one_of(sorted(trained))}"


def _ask(run: Run, query: str) -> list[Any]:
    if fence_condition(run.layout, "trajectories") is None:
        log_alone = run.connect({"stored": open_dataset(run.layout.trajectories)})
        with suppress(duckdb.BinderException, duckdb.CatalogException):  # of the ledger, perhaps
            return _read_only(log_alone, query.format(table="logged"))
    return _read_only(run.database(), query.format(table="trajectories"))


def _read_only(database: duckdb.DuckDBPyConnection, query: str) -> list[Any]:
    """Answer a query of which a user wrote a part; it may read, and takes a minute at most."""
    with closing(database):
        allow_reading_only(database)
        if len(database.extract_statements(query)) != 1:
            raise duckdb.ParserException("several statements")
        timer = Timer(MOST_SECONDS, database.interrupt)
        timer.start()
        try:
            rows: list[Any] = database.sql(query).fetchall()
        finally:
            timer.cancel()
        return rows


def _consumption_of(run: Run, members: pa.Table) -> pa.Table:
    """Return what became of these rows; a step below their versions can say nothing of them.

    A row whose workflow failed has no version.
    """
    spans = members["version_spans"]
    versions = pc.struct_field(pc.list_flatten(spans), "version")
    has_failures = pc.any(pc.equal(pc.list_value_length(spans), 0)).as_py()
    since = f"step >= {0 if has_failures else pc.min(versions).as_py() or 0}"
    return consumption_table(run.steps("arrow", columns=LEDGER_COLUMNS, where=since), members)


def _one_of(indices: Sequence[int]) -> str:
    return f"submission_index IN ({', '.join(map(str, indices)) or 'NULL'})"


def show_group(run: Run, submission_index: int) -> list[ShownTrajectory]:
    """Read a group's members, with all that is stored of them or follows without a model."""
    stored = read_rows(run.layout, "trajectories", where=_one_of([submission_index]))
    tables = {"stored": stored, "consumption": _consumption_of(run, stored)}
    with closing(run.connect({**tables, "prompts": run.prompts()})) as database:
        rows = database.sql("FROM trajectories ORDER BY trajectory_id").to_arrow_table().to_pylist()
        return show_rows(run, database, rows)
