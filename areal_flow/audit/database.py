"""A run's ledger and log as tables of an in-memory DuckDB, and rules that are queries over them.

Rules stand in `sql/`, each under its name and its advice. A rule returns a row (where, expected,
found) for each place that breaks it. Of a trajectory only what rules ask for is kept: counts by
version span, no token. Nothing here reads a run.

    ledger        every stored row, `place` being how findings name it; `position` as it was read
    steps         the first row of each step
    log           every trajectory that was read
    trajectories  the first commit of each id
    consumed      each trajectory that a step trained or discarded, as often as a row says so
    recounted     `steps`, and beside them the same numbers, counted from the log: `log_...`
    forks, recipe, files, checkpoints, published
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from typing import Any

import duckdb
import pyarrow as pa

from areal_flow.audit.findings import ADVICE, MAX_PER_RULE, Finding
from areal_flow.controller.records import batch_digest
from areal_flow.store.codec import TRAJECTORIES
from areal_flow.store.consumption import CONSUMED
from areal_flow.store.database import TOKEN_MACROS
from areal_flow.store.dataset import COMMIT_ORDER


def _schema(texts: str, numbers: str) -> pa.Schema:
    """Return columns of texts and of whole numbers, both named in one string."""
    types = dict.fromkeys(texts.split(), pa.string()) | dict.fromkeys(numbers.split(), pa.int64())
    return pa.schema(types)


RECIPE = _schema("config_hash code_version", "group_size groups_per_step max_staleness")
"""What rules need of the recipe: one row, or none if it cannot be read."""

FORKS = _schema("recorded_hash weights_hash served_hash", "step")
"""Replays that made other weights than `recorded_hash`."""

FILES = _schema("kind", "step")
"""Directories of checkpoints and of published weights, by the step in their name."""

CHECKPOINTS = _schema(
    "place weights_hash optimizer_hash config_hash found_weights_hash found_optimizer_hash "
    "other_files",
    "listed_step step next_submission_index",
)
"""What each checkpoint says of itself, and what was found of its files."""

PUBLISHED = _schema("place recorded_hash tensors_hash", "step")
"""Published weights: the hash beside the tensors, and theirs."""

_RULE = re.compile(r"^-- rule (\S+): (\S+)\n", re.MULTILINE)

_DIFFERS = """
CREATE MACRO differs(a, b) AS
    isnan(a::DOUBLE) <> isnan(b::DOUBLE) OR abs(a - b) > 1e-9 * greatest(1, abs(a), abs(b));
"""

_KEPT = f"""
SELECT trajectory_id, group_id, submission_index, member, branch, reward,
       "{COMMIT_ORDER}" AS commit_order,
       len(output_tokens) AS num_tokens,
       coalesce(
           list_bool_and(list_transform(behavior_logprobs, lambda logprob: isfinite(logprob))), true
       ) AS finite,
       chosen_spans(version_spans, loss_mask) AS spans
FROM piece
"""


class AuditDatabase:
    """Tables of one run: filled first, then asked which rules do not hold."""

    def __init__(self) -> None:
        self._connection = duckdb.connect()
        self._connection.execute(TOKEN_MACROS + _DIFFERS)
        self._connection.create_function(
            "digest_of", batch_digest, ["BIGINT", "VARCHAR[]"], "VARCHAR"
        )
        nothing = TRAJECTORIES.append(pa.field(COMMIT_ORDER, pa.int64())).empty_table()
        self._with("piece", nothing, f"CREATE TABLE log AS {_KEPT}")

    def close(self) -> None:
        self._connection.close()

    def add_ledger(self, rows: pa.Table) -> None:
        """Take the ledger, of `StepRow`'s schema."""
        position = pa.array(range(len(rows)), pa.int64())
        tables = _sql("tables").format(consumed=CONSUMED)
        self._with("stored_ledger", rows.append_column("position", position), tables)

    def add_trajectories(self, rows: pa.Table) -> None:
        """Keep what rules ask for of trajectories, in `TrajectoryRow`'s schema and commit order."""
        self._with("piece", rows, f"INSERT INTO log {_KEPT}")

    def add_table(self, name: str, rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> None:
        """Add one of the smaller tables."""
        table = pa.Table.from_pylist(list(rows), schema=schema)
        self._with("added", table, f"CREATE TABLE {name} AS FROM added")

    def recount(self, *, num_rows: int) -> None:
        """Count the ledger's numbers again, once ledger, log and recipe are complete.

        Args:
            num_rows: of the dataset, those of superseded drivers included: watermarks count them.
        """
        self.add_table("dataset", [{"num_rows": num_rows}], _schema("", "num_rows"))
        self._connection.execute(_sql("recounted"))

    def broken(self, name: str) -> Iterator[tuple[Finding, int]]:
        """Ask the rules of one file in `sql/`.

        Yields:
            At most `MAX_PER_RULE` findings of each rule, and how many more there are after it.
        """
        for rule, advice, query in rules_of(name):
            found = self._connection.execute(
                f"SELECT *, count(*) OVER () FROM (\n{query}) ORDER BY 1 LIMIT {MAX_PER_RULE}"
            ).fetchall()
            for number, (where, expected, value, total) in enumerate(found, 1):
                finding = Finding(rule, where, str(expected), str(value), ADVICE[advice])
                yield finding, total - number if number == len(found) else 0

    def _with(self, name: str, table: pa.Table, statements: str) -> None:
        self._connection.register(name, table)
        self._connection.execute(statements)
        self._connection.unregister(name)


def rules_of(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, advice and query of each rule of a file."""
    _, *parts = _RULE.split(_sql(name).replace(";", ""))
    yield from zip(parts[::3], parts[1::3], parts[2::3], strict=True)


def _sql(name: str) -> str:
    return resources.files("areal_flow.audit").joinpath("sql", f"{name}.sql").read_text()
