"""Prints the runs of a folder: state, steps, pass rates."""

from __future__ import annotations

import json
from pathlib import Path

from areal_flow.layout import RunLayout
from areal_flow.recovery.lease import newest_lease
from areal_flow.recovery.run_directory import list_runs, observed_state
from areal_flow.store.queries import open_run
from pipelines.cli.tables import print_table
from pipelines.cli.terminal import make_console


def print_runs(runs: Path) -> None:
    """Print every run with its state and how far it is."""
    rows = [_row(layout) for layout in list_runs(runs)]
    if not rows:
        print(f"no runs in {runs}")
        return
    labels = ("run", "state", "steps", "pass rate", "since", "reason")
    print_table(make_console(), labels, rows, prose=("reason",))


def _row(layout: RunLayout) -> tuple[str, ...]:
    observed, lease = observed_state(layout), newest_lease(layout.writers)
    since = lease.since if lease else "-"
    progress = _num_steps(layout), _rates(layout)
    return (layout.name, observed.state, *progress, since, observed.reason)


def _num_steps(layout: RunLayout) -> str:
    if not layout.steps.is_dir():
        return "-"
    return str(max(0, len(open_run(layout.root).steps("arrow", columns=["step"])) - 1))


def _rates(layout: RunLayout) -> str:
    if not layout.summary.is_file():
        return "-"
    summary = json.loads(layout.summary.read_text())
    before, after = summary["held_out_before"], summary["held_out_after"]
    if not (before and after):
        return "-"
    return f"{before['pass_rate']:.3f} -> {after['pass_rate']:.3f}"
