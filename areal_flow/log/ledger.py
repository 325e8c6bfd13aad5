"""The step ledger: one row a step, in order, each naming the row before it by hash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lance
import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.core.errors import RunError, StorageError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.log.dataset import (
    Maintenance,
    conjunction,
    fence_condition,
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
        self._path = layout.steps
        self._counted = fence_condition(layout, "steps")
        self._dataset = open_dataset(self._path)
        self.head = max(self.table(["step"])["step"].to_pylist(), default=-1)

    def rows(self, columns: list[str] | None = None, *, since: int = 0) -> list[dict[str, Any]]:
        """Return the rows from step `since` on, by step."""
        table = self.table(columns if columns is None else ["step", *columns], since=since)
        rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
        rows.sort(key=lambda row: row["step"])
        if [row["step"] for row in rows] != list(range(since, self.head + 1)):
            raise StorageError(
                f"expected each of the steps {since} to {self.head} once in {self._path}"
            )
        return rows

    def table(self, columns: list[str] | None = None, *, since: int = 0) -> pa.Table:
        """Return columns of the rows from step `since` on, in any order."""
        condition = conjunction(f"step >= {since}", self._counted)
        return self._dataset.to_table(columns=columns, filter=condition)


class Ledger(LedgerReader):
    """Appends step rows for the driver that holds the run.

    A row is checked against the Arrow schema; pandera's check costs more than a small step.
    """

    def __init__(self, layout: RunLayout, writer: Writer) -> None:
        super().__init__(layout)
        self._writer = writer
        self.maintenance = Maintenance(self._path, num_fragments=len(self._dataset.get_fragments()))

    def append(self, row: dict[str, Any]) -> None:
        assert row["step"] == self.head + 1, "a step follows the one before"
        table = pa.Table.from_pylist([row], schema=STEPS)
        self._writer.check_current()
        with self.maintenance.commit():
            self._dataset = lance.write_dataset(table, self._dataset, mode="append")
        self.head = row["step"]
