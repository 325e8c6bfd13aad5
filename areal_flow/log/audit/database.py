"""A run's ledger and log as tables of an in-memory DuckDB, and rules that are queries over them.

Rules stand in `sql/`, each under its name and its advice. A rule returns a row (where, expected,
found) for each place that breaks it. Nothing here reads a run.

    ledger        every stored row, `place` being how findings name it
    steps         the first row of each step
    log           every trajectory that was read
    trajectories  the first commit of each id
    consumed      each trajectory that a step trained or discarded, as often as a row says so
    placed        `consumed`, and the place and watermark of the row that says so
    recounted     `steps`, and beside them the same numbers, counted from the log: `log_...`
    batch_metrics what the log has for each entry of `metrics` that a step's batch makes
    repeated_ids  ids of the prompt tables that several prompts share
    forks, parents, recipe, files, checkpoints, published, dataset: see `sql/tables.sql`
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from areal_flow.log.audit.findings import ADVICE, Finding
from areal_flow.log.database import empty_database, read_sql
from areal_flow.log.ledger_row import batch_digest, member_seed
from schemas import content_hashes

_RULE = re.compile(r"^-- rule (\S+): (\S+)\n", re.MULTILINE)
_PROMPT_COLUMNS = ("source", "prompt_id", "difficulty", "prompt_tokens")


class AuditDatabase:
    """Tables of one run: filled first, then asked which rules do not hold."""

    def __init__(self) -> None:
        self._connection = empty_database()
        for name, function, parameters, returned in (
            ("digest_of", batch_digest, ["BIGINT", "VARCHAR[]"], "VARCHAR"),
            ("seed_of", member_seed, ["BIGINT", "BIGINT", "BIGINT"], "BIGINT"),
        ):
            self._connection.create_function(name, function, parameters, returned)
        self._connection.execute(read_sql("tokens") + read_sql("passing") + _sql("tables"))

    def close(self) -> None:
        self._connection.close()

    def add_ledger(self, rows: pa.Table) -> None:
        self._with(
            "stored_ledger", rows, _sql("ledger_tables") + read_sql("consumed") + _sql("consumed")
        )

    def add_trajectories(self, rows: pa.Table, prompts: pa.Table | None = None) -> None:
        """Keep what rules ask for, beside what the prompt table has for the same submissions."""
        batch = rows.append_column("found_hash", pa.array(content_hashes(rows), pa.string()))
        for name in _PROMPT_COLUMNS:
            batch = batch.append_column(f"expected_{name}", (prompts or rows)[name])
        self._with("batch", batch, _sql("insert_log"))

    def add_prompts(self, place: str, prompts: pa.Table) -> None:
        self._with(
            "prompts",
            prompts,
            f"INSERT INTO repeated_ids SELECT '{place}', prompt_id, "
            "count(DISTINCT hash(prompt, answer, metadata)) AS num_prompts "
            "FROM prompts GROUP BY source, prompt_id HAVING num_prompts > 1",
        )

    def add(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        if added := list(rows):
            statement = f"INSERT INTO {table} BY NAME FROM added"
            self._with("added", pa.Table.from_pylist(added), statement)

    def recount(self) -> None:
        """Count the ledger's numbers again, once all other tables are complete."""
        self._connection.execute(_sql("recounted"))

    def broken(self, name: str) -> Iterator[Finding]:
        """Yield findings of the rules in a file."""
        for rule, advice, query in rules_of(name):
            result = self._connection.execute(f"FROM (\n{query}) ORDER BY 1")
            while row := result.fetchone():
                where, expected, value = row
                yield Finding(rule, where, str(expected), str(value), ADVICE[advice])

    def _with(self, name: str, table: pa.Table, statements: str) -> None:
        self._connection.register(name, table)
        self._connection.execute(statements)
        self._connection.unregister(name)


def rules_of(name: str) -> Iterator[tuple[str, str, str]]:
    _, *parts = _RULE.split(_sql(name).replace(";", ""))
    yield from zip(parts[::3], parts[1::3], parts[2::3], strict=True)


def _sql(name: str) -> str:
    return read_sql(name, package="areal_flow.log.audit")
