"""What an audit found, how an evaluation went, and which runs there are."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal_flow.audit.run import check_run
from areal_flow.layout import RunLayout
from areal_flow.recovery.lease import newest_lease
from areal_flow.recovery.run_directory import list_runs, observed_state
from areal_flow.store.queries import open_run
from areal_flow.types import EvaluationTable
from pipelines.cli.tables import Report, Table

_CHECK_COLUMNS = {
    "": "{severity}",
    "rule": "{rule}",
    "where": "{where}",
    "expected": "{expected}",
    "found": "{found}",
    "what to do": "{advice}",
}
_EVALUATION_COLUMNS = {
    "difficulty": "{difficulty}",
    "prompts": "{n}",
    "pass rate": "{pass_rate:.3f}",
    "95% interval": "[{low:.3f}, {high:.3f}]",
    "mean length": "{mean_length:.1f}",
}
_RUN_COLUMNS = {
    "run": "{run}",
    "state": "{state}",
    "steps": "{num_steps}",
    "pass rate": "{before:.3f} -> {after:.3f}",
    "since": "{since}",
    "reason": "{reason}",
}


def report_check(layout: RunLayout) -> Report:
    """Report each finding with what to do, and how much was looked at."""
    audit = check_run(layout)
    found = audit.as_json()
    checked = ", ".join(f"{count} {kind}" for kind, count in audit.checked.items()) or "nothing"
    table = Table(_CHECK_COLUMNS, found["findings"], prose=(*_CHECK_COLUMNS,)[2:])
    last = f"{audit.run}: {audit.verdict}. Checked: {checked}"
    return Report(found, [*([table] if audit.findings else []), last], code=int(not audit.clean))


def report_evaluation(found: EvaluationTable, model: Path) -> Report:
    """Report pass rates by difficulty, and the overall one as a line of JSON."""
    overall = asdict(found.overall)
    rows = [
        {"difficulty": difficulty, **asdict(rate), "mean_length": length}
        for difficulty, (rate, length) in found.by_difficulty.items()
    ]
    table = Table(_EVALUATION_COLUMNS, rows, f"{model.name}: held-out prompts, one sample each")
    data = {"model": model, "overall": overall, "by_difficulty": rows}
    return Report(data, [table, json.dumps(overall)])


def report_runs(runs: Path) -> Report:
    """Report every run with its state and how far it is."""
    rows = [_run(layout) for layout in list_runs(runs)]
    table = Table(_RUN_COLUMNS, rows, prose=("reason",))
    return Report({"runs": rows}, [table if rows else f"no runs in {runs}"])


def _run(layout: RunLayout) -> dict[str, Any]:
    lease, num_steps, rates = newest_lease(layout.writers), None, {}
    if layout.steps.is_dir():
        num_steps = max(0, len(open_run(layout.root).steps("arrow", columns=["step"])) - 1)
    if layout.summary.is_file():
        summary = json.loads(layout.summary.read_text())
        rates = {when: summary[f"held_out_{when}"] or {} for when in ("before", "after")}
    return {
        "run": layout.name,
        **asdict(observed_state(layout)),
        "num_steps": num_steps,
        "before": rates.get("before", {}).get("pass_rate"),
        "after": rates.get("after", {}).get("pass_rate"),
        "since": lease.since if lease else None,
    }
