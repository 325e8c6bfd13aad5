"""What went wrong in a run and what was done about it: when or where, and what."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from areal_flow.layout import RunLayout
from areal_flow.recovery.lease import leases
from pipelines.cli.run_log import logged_warnings

_DISCARDS = """
SELECT reason, count(*) FROM consumption WHERE status = 'discarded' GROUP BY reason ORDER BY reason
"""
_MOST_WARNINGS = 100
_EVERYWHERE = "all steps"


def find_events(
    layout: RunLayout, steps: Sequence[Mapping[str, Any]], database: Any
) -> list[tuple[str, str]]:
    """Return drivers, what was given up, other verifiers, replays to other policies, warnings.

    Args:
        steps: rows of the ledger.
        database: the run's, as `Run.database` makes it.
    """
    return [
        *_drivers(layout),
        *(
            (f"step {row['step']}", f"groups given up: {', '.join(map(str, given_up))}")
            for row in steps
            if (given_up := row["failed_submissions"])
        ),
        *(
            (f"step {row['step']}", f"another verifier scored from here on: {row['verifier']}")
            for before, row in pairwise(steps)
            if row["verifier"] != before["verifier"]
        ),
        *_counts(steps, database),
        *_forks(layout),
        *logged_warnings(layout.log)[:_MOST_WARNINGS],
    ]


def _drivers(layout: RunLayout) -> list[tuple[str, str]]:
    return [
        (
            _local(lease.since),
            f"driver {lease.writer_epoch} began: process {lease.pid} on {lease.host}",
        )
        for lease in leases(layout.writers)
    ]


def _counts(steps: Sequence[Mapping[str, Any]], database: Any) -> list[tuple[str, str]]:
    num_failed = sum(row["num_failed_members"] for row in steps)
    failed = {f"{num_failed:,} completions that no verifier scored": num_failed}
    discarded = {
        f"{count:,} trajectories discarded: {reason}": count
        for reason, count in database.sql(_DISCARDS).fetchall()
    }
    return [(_EVERYWHERE, said) for said, count in {**failed, **discarded}.items() if count]


def _forks(layout: RunLayout) -> list[tuple[str, str]]:
    lines = layout.forks.read_text().splitlines() if layout.forks.is_file() else []
    return [
        (_local(fork["at"]), f"step {fork['step']} was replayed to another policy")
        for fork in map(json.loads, lines)
    ]


def _local(moment: str) -> str:
    return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")
