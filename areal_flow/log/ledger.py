"""Reads the step ledger: one row per step, in order, each with its parent's weights hash."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from lance.dataset import LanceScanner

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
BATCH_ROWS = 1024
"""A long ledger is read in batches of about so many rows."""


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
    maps = _metrics_of(steps)
    steps = steps.drop_columns(["metrics"])
    for name in sorted({name for metrics in maps for name in metrics}):
        values = pa.array([metrics.get(name) for metrics in maps], pa.float64())
        steps = steps.append_column(name, values)
    return steps


def _rows_of(steps: pa.Table) -> list[dict[str, Any]]:
    if "metrics" not in steps.column_names:
        return steps.to_pylist()  # type: ignore[no-any-return]
    rows: list[dict[str, Any]] = steps.drop_columns(["metrics"]).to_pylist()
    for row, metrics in zip(rows, _metrics_of(steps), strict=True):
        row["metrics"] = metrics
    return rows


def _metrics_of(steps: pa.Table) -> list[dict[str, float]]:
    """Return the `metrics` maps of rows; Arrow's own conversion takes eight times as long."""
    metrics: list[dict[str, float]] = []
    for chunk in steps["metrics"].chunks:
        names, values, offsets = chunk.keys, chunk.items, chunk.offsets.to_pylist()
        items = [*zip(names.to_pylist(), values.to_pylist(), strict=True)]
        metrics += [dict(items[begin:end]) for begin, end in pairwise(offsets)]
    return metrics


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
        return [row for batch in self.batches(columns, since=since) for row in batch]

    def batches(
        self, columns: list[str] | None = None, *, since: int = 0
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows from step `since` on, by step, `BATCH_ROWS` or a few more at a time."""
        names = columns if columns is None else ["step", *columns]
        scanner = self._newest(names, f"step >= {since}", self.head + 1 - since)
        incomplete = StorageError(
            f"expected each of the steps {since} to {self.head} once in {self._layout.steps}"
        )
        # A compaction beside an append leaves its older rows behind the newer ones.
        early: dict[int, dict[str, Any]] = {}
        ready: list[dict[str, Any]] = []
        for batch in scanner.to_batches():
            for row in _rows_of(pa.Table.from_batches([batch])):
                if row["step"] < since or early.setdefault(row["step"], row) is not row:
                    raise incomplete
            while since in early:
                ready.append(early.pop(since))
                since += 1
            if len(ready) >= BATCH_ROWS:
                yield ready
                ready = []
        if since != self.head + 1:
            raise incomplete
        if ready:
            yield ready

    def row(self, step: int, columns: list[str] | None = None) -> dict[str, Any]:
        rows = _rows_of(self._newest(columns, f"step = {step}", 1).to_table())
        if len(rows) != 1:
            raise StorageError(f"expected step {step} once in {self._layout.steps}")
        return rows[0]

    def table(self, columns: list[str] | None = None, *, since: int = 0) -> pa.Table:
        """Return columns of the rows from step `since` on, in any order."""
        return self._newest(columns, f"step >= {since}", self.head + 1 - since).to_table()

    def _newest(self, columns: list[str] | None, where: str, num_rows: int) -> LanceScanner:
        visible = conjunction(where, self._is_visible)
        fragments = newest_fragments(self._dataset, visible, num_rows=num_rows)
        options = {"batch_size": BATCH_ROWS, "batch_readahead": 1, "fragment_readahead": 1}
        return self._dataset.scanner(columns, filter=visible, fragments=fragments, **options)


class LedgerTail:
    """Reads a growing ledger, each row once."""

    def __init__(
        self, layout: RunLayout, columns: Sequence[str], *, since: int, newest: int | None = None
    ) -> None:
        """Begin with step `since`. With `newest`, only so many of the newest rows are read."""
        self._layout = layout
        self._columns = list(columns)
        self._next_step = since
        self._newest = newest

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows appended since the last call, by step."""
        ledger = LedgerReader(self._layout)
        if self._newest is not None:
            self._next_step = max(self._next_step, ledger.head + 1 - self._newest)
        if self._next_step > ledger.head:
            return
        for rows in ledger.batches(self._columns, since=self._next_step):
            self._next_step += len(rows)
            yield rows
