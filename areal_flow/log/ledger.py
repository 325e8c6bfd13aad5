"""Reads the step ledger: one row per step, in order, each with its parent's weights hash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.core.errors import RunError, StorageError
from areal_flow.core.layout import RunLayout
from areal_flow.log.dataset import (
    conjunction,
    fence_condition,
    newest_fragments,
    open_dataset,
    read_rows,
)
from schemas import StepRow, arrow_schema

STEPS = arrow_schema(StepRow)


def read_steps(
    layout: RunLayout, columns: Sequence[str] | None = None, where: str | None = None
) -> pa.Table:
    """Return step rows in order, with a column for each name in their `metrics` map.

    A column is null where a row's map lacks its name; means, rates and durations are null at the
    genesis, which has trained nothing.
    """
    names = {*STEPS.names} if columns is None else {*columns, "step"}
    if names - {*STEPS.names}:
        names.add("metrics")
    stored = [name for name in STEPS.names if name in names]
    # A compaction beside an append leaves its older rows behind the newer ones.
    steps = flatten_metrics(read_rows(layout, "steps", stored, where).sort_by("step"))
    steps = _without_means_of_nothing(steps)
    if missing := set(columns or ()).difference(steps.column_names):
        raise RunError(
            f"expected columns of the ledger or names of metrics that a step of {layout.steps} "
            f"has, found {', '.join(sorted(missing))}; it has {', '.join(steps.column_names)}"
        )
    return steps if columns is None else steps.select(columns)


def flatten_metrics(steps: pa.Table) -> pa.Table:
    if "metrics" not in steps.column_names:
        return steps
    maps = steps["metrics"].to_pylist(maps_as_pydicts="strict")
    steps = steps.drop_columns(["metrics"])
    for name in sorted({name for metrics in maps for name in metrics}):
        values = pa.array([metrics.get(name) for metrics in maps], pa.float64())
        steps = steps.append_column(name, values)
    return steps


def _without_means_of_nothing(steps: pa.Table) -> pa.Table:
    is_trained = pc.greater(steps["step"], 0)
    for place, field in enumerate(steps.schema):
        if pa.types.is_floating(field.type) or field.name == "staleness_max":
            values = pc.if_else(is_trained, steps[place], pa.scalar(None, field.type))
            steps = steps.set_column(place, field.name, values)
    return steps


class LedgerReader:
    """Reads the visible step rows, as of when it was opened."""

    head: int
    """The newest step, -1 before the genesis."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._is_visible = fence_condition(layout, "steps")
        self._dataset = open_dataset(layout.steps)
        self.head = self._dataset.count_rows(self._is_visible) - 1

    def rows(self, columns: list[str] | None = None, *, since: int = 0) -> list[dict[str, Any]]:
        """Return the rows from step `since` on, by step."""
        table = self.table(columns if columns is None else ["step", *columns], since=since)
        rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
        rows.sort(key=lambda row: row["step"])
        if [row["step"] for row in rows] != list(range(since, self.head + 1)):
            raise StorageError(
                f"expected each of the steps {since} to {self.head} once in {self._layout.steps}"
            )
        return rows

    def row(self, step: int, columns: list[str]) -> dict[str, Any]:
        rows: list[dict[str, Any]] = self._newest(columns, f"step = {step}", 1).to_pylist(
            maps_as_pydicts="strict"
        )
        if len(rows) != 1:
            raise StorageError(f"expected step {step} once in {self._layout.steps}")
        return rows[0]

    def table(self, columns: list[str] | None = None, *, since: int = 0) -> pa.Table:
        """Return columns of the rows from step `since` on, in any order."""
        return self._newest(columns, f"step >= {since}", self.head + 1 - since)

    def _newest(self, columns: list[str] | None, where: str, num_rows: int) -> pa.Table:
        visible = conjunction(where, self._is_visible)
        fragments = newest_fragments(self._dataset, visible, num_rows=num_rows)
        return self._dataset.scanner(columns, filter=visible, fragments=fragments).to_table()


class LedgerTail:
    """Reads a growing ledger, each row once."""

    def __init__(
        self, layout: RunLayout, columns: Sequence[str], *, since: int, max_rows: int | None = None
    ) -> None:
        self._layout = layout
        self._columns = list(columns)
        self._next_step = since
        self._max_rows = max_rows

    def read(self) -> list[dict[str, Any]]:
        """Return the rows appended since the last call, the newest `max_rows` if they are more."""
        ledger, since = LedgerReader(self._layout), self._next_step
        if self._max_rows is not None:
            since = max(since, ledger.head + 1 - self._max_rows)
        if since > ledger.head:
            return []
        rows = ledger.rows(self._columns, since=since)
        self._next_step = ledger.head + 1
        return rows
