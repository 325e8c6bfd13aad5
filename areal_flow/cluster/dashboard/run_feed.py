"""Reads a run's logs for the page: only while somebody looks, in a thread, once for all viewers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from datetime import UTC, datetime
from time import monotonic

import polars as pl

from areal_flow.cluster.dashboard.run_numbers import (
    CURVES,
    TRAINER,
    generator_speeds,
    groups_of,
    stages,
    steps_of,
    work_spans,
)
from areal_flow.cluster.pool import WorkerPool
from areal_flow.controller.bottleneck import find_bottleneck
from areal_flow.controller.flow import Flow
from areal_flow.run.layout import RunLayout
from areal_flow.store.dataset import COMMIT_ORDER, read_rows
from areal_flow.store.ledger import STEPS, LedgerReader

LEAST_AGE_S = 1.0
"""What was read is read again when it is older."""
MOST_STEPS = 2000
"""Of the newest ones."""
RECENT_STEPS = 8
"""The timeline, the waits, the speeds and the verdict are over so many steps."""
MOST_ROWS = 16_384
"""Of the log, in these steps."""
_STEP_COLUMNS = [n for n in STEPS.names if n not in ("step", "trajectory_ids", "discarded")]
_LOG_COLUMNS = [
    *("group_id", "generator", "version_spans"),
    *("submitted_at", "started_at", "finished_at", "scored_at"),
]

Shown = dict[str, pl.DataFrame]
"""Tables by the parts of the page that draw them; none before the first step."""


class RunFeed:
    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout
        self.pool: WorkerPool | None = None
        self.flow: Flow | None = None
        """Of the training, once it begins."""
        self.num_reads = 0
        self._steps = steps_of([])
        self._shown: Shown = {}
        self._read_at = 0.0
        self._reading = asyncio.Lock()

    async def shown(self) -> Shown:
        """Return what there is to draw, read now or a moment ago."""
        async with self._reading:
            if monotonic() - self._read_at >= LEAST_AGE_S and self.layout.steps.is_dir():
                self._shown = await asyncio.to_thread(self._read, self._at_work())
                self._read_at = monotonic()
        return self._shown

    def _read(self, at_work: Collection[str]) -> Shown:
        self.num_reads += 1
        ledger, newest = LedgerReader(self.layout), self._steps["step"].max() or 0
        since = max(int(newest) + 1, ledger.head - MOST_STEPS)
        if since <= ledger.head:
            new = steps_of(ledger.rows(_STEP_COLUMNS, since=since))
            self._steps = self._steps.vstack(new).tail(MOST_STEPS)
        if self._steps.is_empty():
            return {}
        steps = self._steps.tail(RECENT_STEPS)
        first, last = steps["trajectory_watermark"][0], steps["trajectory_watermark"][-1]
        where = f"{COMMIT_ORDER} >= {max(first, last - MOST_ROWS)}"
        rows = pl.DataFrame(read_rows(self.layout, "trajectories", _LOG_COLUMNS, where))
        return self._compute(steps, groups_of(rows), at_work)

    def _compute(
        self, steps: pl.DataFrame, groups: pl.DataFrame, at_work: Collection[str]
    ) -> Shown:
        since, until = steps["committed_at"][0], steps["committed_at"][-1]
        now = datetime.now(UTC) if at_work else until
        found = find_bottleneck(steps.to_dicts(), num_generators=max(1, len(at_work)))
        verdict = {"step": steps["step"][-1], "text": found.text, "remedy": found.remedy}
        return {
            "verdict": pl.DataFrame([verdict]),
            "curves": self._steps.select("step", **CURVES),
            "spans": work_spans(steps[1:], groups, at_work=at_work, now=now),
            "swaps": steps.select(at=(pl.col("committed_at") - now).dt.total_microseconds() / 1e6),
            "speeds": generator_speeds(groups, since=since, now=now),
            **({"stages": stages(self.flow, steps, groups)} if self.flow else {}),
        }

    def _at_work(self) -> list[str]:
        """Return the generators that have a task, and the trainer while it has a batch."""
        if self.pool is None:
            return []
        workers = self.pool.scheduler.workers
        generators = self.pool.registry.present("generator")
        found = [each.name for each in generators if workers[each.address].processing]
        return [*found, TRAINER] if self.flow and self.flow.accounting.in_step else found
