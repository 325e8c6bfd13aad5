"""What went wrong in a run and what was done about it: when or where, and what."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from areal_flow.run.layout import RunLayout
from areal_flow.run.lease import leases
from pipelines.console.run_log import logged_warnings

_DISCARDS = """
SELECT reason, count(*) FROM consumption WHERE status = 'discarded' GROUP BY reason ORDER BY reason
"""
_MOST_WARNINGS = 100


def find_events(
    layout: RunLayout, steps: Sequence[Mapping[str, Any]], database: Any
) -> list[tuple[str, str]]:
    found = []
    for lease in leases(layout.writers):
        said = f"driver {lease.writer_epoch} began: process {lease.pid} on {lease.host}"
        found.append((_local(lease.since), said))
    for row in steps:
        if given_up := row["failed_submissions"]:
            said = f"groups given up: {', '.join(map(str, given_up))}"
            found.append((f"step {row['step']}", said))
    for before, row in pairwise(steps):
        if row["verifier"] != before["verifier"]:
            said = f"another verifier scored from here on: {row['verifier']}"
            found.append((f"step {row['step']}", said))
    for reason, count in database.sql(_DISCARDS).fetchall():
        found.append(("all steps", f"{count:,} trajectories discarded: {reason}"))
    for fork in map(json.loads, _lines(layout.forks)):
        found.append((_local(fork["at"]), f"step {fork['step']} was replayed to another policy"))
    return [*found, *logged_warnings(layout.log)[:_MOST_WARNINGS]]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def _local(moment: str) -> str:
    return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")
