"""The runs of a folder as a table: state, steps, pass rates."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from areal_flow.layout import RunLayout
from areal_flow.recovery.lease import newest_lease
from areal_flow.recovery.run_directory import list_runs, observed_state
from areal_flow.store.queries import open_run


def print_runs(runs: Path) -> None:
    """Print every run with its state and how far it is."""
    found = list_runs(runs)
    if not found:
        print(f"no runs in {runs}")
        return
    table = Table(box=None)
    for label in ("run", "state", "steps", "pass rate", "since", "reason"):
        table.add_column(label, overflow="fold")
    for layout in found:
        state = observed_state(layout)
        table.add_row(
            layout.name,
            state.state,
            _num_steps(layout),
            _rates(layout),
            _since(layout),
            state.reason,
        )
    Console().print(table, markup=False, highlight=False)


def _num_steps(layout: RunLayout) -> str:
    if not layout.steps.is_dir():
        return "-"
    return str(max(0, len(open_run(layout.root).steps("arrow", columns=["step"])) - 1))


def _since(layout: RunLayout) -> str:
    claim = newest_lease(layout.writers)
    return claim.since if claim else "-"


def _rates(layout: RunLayout) -> str:
    if not layout.summary.is_file():
        return "-"
    summary = json.loads(layout.summary.read_text())
    before, after = summary["held_out_before"], summary["held_out_after"]
    if not (before and after):
        return "-"
    return f"{before['pass_rate']:.3f} -> {after['pass_rate']:.3f}"
