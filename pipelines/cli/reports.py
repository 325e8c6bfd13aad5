"""What an audit found, how an evaluation went and which runs there are, on a terminal."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from areal_flow.audit.findings import Report
from areal_flow.layout import RunLayout
from areal_flow.recovery.lease import newest_lease
from areal_flow.recovery.run_directory import list_runs, observed_state
from areal_flow.store.queries import open_run
from areal_flow.types import EvaluationTable
from pipelines.cli.tables import make_console, print_table


def print_check_json(report: Report) -> None:
    """Print what was found as one JSON object."""
    print(json.dumps(report.as_json()))


def print_check(report: Report) -> None:
    """Print each finding with what to do, and how much was looked at."""
    if report.findings:
        labels = ("", "rule", "where", "expected", "found", "what to do")
        rows = [(f.severity, *f[:5]) for f in report.findings]
        print_table(make_console(), labels, rows, prose=labels[2:])
    checked = ", ".join(f"{count} {kind}" for kind, count in report.checked.items()) or "nothing"
    print(f"{report.run}: {report.verdict}. Checked: {checked}")


def print_evaluation(found: EvaluationTable, model: str) -> None:
    """Print a table by difficulty, and one line of JSON."""
    rows = [
        (
            str(difficulty),
            str(rate.n),
            f"{rate.pass_rate:.3f}",
            f"[{rate.low:.3f}, {rate.high:.3f}]",
            f"{length:.1f}",
        )
        for difficulty, (rate, length) in found.by_difficulty.items()
    ]
    labels = ("difficulty", "prompts", "pass rate", "95% interval", "mean length")
    title = f"{model}: held-out prompts, one sample each"
    print_table(make_console(), labels, rows, title=title)
    print(json.dumps(asdict(found.overall)))


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
