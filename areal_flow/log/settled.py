"""The settled past of a run's logs: sums and positions, so that a resume reads only what follows.

Trajectories are consumed out of order. So after a step the log is settled up to the first that
waits, and the ledger is read from the first step that consumed one beyond it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from areal_flow.core.durable import replace_file_durably
from areal_flow.core.errors import StorageError
from areal_flow.core.layout import RunLayout
from areal_flow.log.database import LEDGER_COLUMNS, empty_database, read_sql
from areal_flow.log.dataset import (
    COMMIT_ORDER,
    conjunction,
    fence_condition,
    newest_fragments,
    open_dataset,
)
from areal_flow.log.ledger import LedgerReader

TOKEN_SUMS = (
    "num_generated_tokens",
    "num_trained_tokens",
    "num_masked_tokens",
    "num_discarded_tokens",
)
STEP_IDENTITY = ("writer_epoch", "batch_digest", "weights_hash")
SETTLED_STEP_COLUMNS = [*LEDGER_COLUMNS, *STEP_IDENTITY, "failed_submissions", *TOKEN_SUMS]
SETTLED_LOG_COLUMNS = ["trajectory_id", "submission_index", "version_spans", COMMIT_ORDER]


@dataclass(frozen=True, slots=True)
class SettledPast:
    """A run up to a step; by default, before its first."""

    step: int = -1
    writer_epoch: int = 0
    batch_digest: str = ""
    weights_hash: str = ""
    watermark: int = 0
    """No trajectory below this commit order waits: the step, or one before it, consumed it."""
    ledger_since: int = 0
    """No step before this one consumed a trajectory at or beyond the watermark."""
    num_tokens: int = 0
    """Of the trajectories below the watermark."""
    next_open_submission: int = 0
    """All submissions before this one are committed or given up."""
    closed_submissions: tuple[int, ...] = ()
    """Later ones that are, too, as far as step and watermark tell."""
    num_generated_tokens: int = 0
    num_trained_tokens: int = 0
    num_masked_tokens: int = 0
    num_discarded_tokens: int = 0

    def is_of(self, ledger: LedgerReader, *, num_trajectories: int) -> bool:
        """Return whether a ledger has the step, and so all that led to it.

        A driver that was taken over may have recorded a step that is not visible any more.
        """
        if self.step < 0:
            return True
        if self.step > ledger.head or self.watermark > num_trajectories:
            return False
        row = ledger.row(self.step, list(STEP_IDENTITY))
        return all(row[name] == getattr(self, name) for name in STEP_IDENTITY)


NOTHING_SETTLED = SettledPast()


def advance(past: SettledPast, steps: pa.Table, log: pa.Table) -> SettledPast:
    """Return the past up to the newest of `steps`. Pure.

    Args:
        steps: `SETTLED_STEP_COLUMNS` of the ledger from `past.ledger_since` on.
        log: `SETTLED_LOG_COLUMNS` of the visible trajectories from `past.watermark` on, with all
            that these steps consumed.
    """
    with empty_database() as connection:
        connection.register("steps", steps)
        connection.register("stored", log)
        connection.execute(
            f"""CREATE VIEW log AS
            SELECT trajectory_id, submission_index, {COMMIT_ORDER}::BIGINT AS commit_order,
                   list_sum(list_transform(version_spans, lambda span: span.length)) AS num_tokens
            FROM stored"""
        )
        connection.execute(read_sql("consumed"))
        connection.execute("CREATE VIEW consumed AS FROM consumed_by('steps')")
        return advance_in(connection, past)


def advance_in(connection: duckdb.DuckDBPyConnection, past: SettledPast) -> SettledPast:
    """Return the past up to the newest of the connection's `steps`; it has `log` and `consumed`."""
    values = asdict(past)
    sums = {name: values[name] for name in ("step", "watermark", "num_tokens", *TOKEN_SUMS)}
    row = connection.execute(read_sql("settled"), sums).fetchone()
    if row is None:
        return past
    position, newly_closed, totals = row
    closed = {*past.closed_submissions, *(newly_closed or ())}
    first_open = past.next_open_submission
    while first_open in closed:
        first_open += 1
    return SettledPast(
        **position,
        **totals,
        next_open_submission=first_open,
        closed_submissions=tuple(sorted(index for index in closed if index > first_open)),
    )


def num_completion_tokens(log: pa.Table) -> int:
    lengths = pc.struct_field(pc.list_flatten(log["version_spans"]), "length")
    return pc.sum(lengths).as_py() or 0


def read_trajectories(layout: RunLayout, past: SettledPast, columns: list[str]) -> pa.Table:
    """Return the visible trajectories that are not settled, in any order."""
    dataset = open_dataset(layout.trajectories)
    later, num_later = f"{COMMIT_ORDER} >= {past.watermark}", dataset.count_rows() - past.watermark
    return dataset.scanner(
        columns,
        filter=conjunction(later, fence_condition(layout, "trajectories")),
        fragments=newest_fragments(dataset, later, num_rows=num_later),
    ).to_table()


def past_of(layout: RunLayout, past: SettledPast, *, step: int) -> SettledPast:
    """Return the past up to a later step, read from the logs."""
    ledger = LedgerReader(layout)
    steps = ledger.table(SETTLED_STEP_COLUMNS, since=past.ledger_since)
    steps = steps.filter(pc.less_equal(steps["step"], step))
    return advance(past, steps, read_trajectories(layout, past, SETTLED_LOG_COLUMNS))


def record_past(layout: RunLayout, past: SettledPast) -> None:
    replace_file_durably(layout.settled, json.dumps(asdict(past)) + "\n")


def read_past(layout: RunLayout, ledger: LedgerReader, *, num_trajectories: int) -> SettledPast:
    """Return the past that was recorded; the empty one if there is none that the logs have."""
    try:
        past = past_from_json(json.loads(layout.settled.read_text()))
        if past.is_of(ledger, num_trajectories=num_trajectories):
            return past
    except (OSError, ValueError, TypeError, KeyError, StorageError):
        pass
    return NOTHING_SETTLED


def past_from_json(record: Mapping[str, Any]) -> SettledPast:
    return SettledPast(**{**record, "closed_submissions": tuple(record["closed_submissions"])})
