"""What `areal-flow check` found, on a terminal."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from areal_flow.audit.findings import Report


def print_json(report: Report) -> None:
    """Print what was found as one JSON object."""
    print(json.dumps(report.as_json()))


def print_check(report: Report) -> None:
    """Print findings as a table, and the verdict as the last line."""
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
