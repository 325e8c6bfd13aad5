"""`areal-flow check`: audit a run from its directory alone."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from pipelines.cli.commands.settings import refuse_settings

if TYPE_CHECKING:
    from areal_flow.audit.findings import Report


def add_to(commands: Any) -> None:
    """Add `check` to the command line's grammar."""
    command = commands.add_parser("check", help="audit a run: books, hashes, versions, orphans")
    command.add_argument("name", metavar="RUN", help="a run's name, or its directory")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=run)


def run(known: argparse.Namespace, dotted: list[str], began: float) -> int:
    """Audit a run; 0 if nothing is wrong with it, else 1."""
    refuse_settings(dotted)
    from areal_flow.audit.run import check_run
    from areal_flow.recovery.run_directory import find_run

    report = check_run(find_run(known.runs, known.name))
    if known.json:
        print(json.dumps(report.as_json()))
    else:
        _print(report)
    return 0 if report.clean else 1


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    if report.findings:
        table = Table(box=None)
        for label in ("", "rule", "where", "expected", "found", "what to do"):
            table.add_column(label, overflow="fold", no_wrap=label == "rule")
        for finding in report.findings:
            table.add_row(
                finding.severity,
                finding.rule,
                finding.where,
                finding.expected,
                finding.found,
                finding.advice,
            )
        Console().print(table, markup=False, highlight=False)
    checked = ", ".join(f"{count} {kind}" for kind, count in report.checked.items()) or "nothing"
    print(f"{report.run}: {report.verdict}. Checked: {checked}")
