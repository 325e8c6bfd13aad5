"""Prints what an audit found."""

from __future__ import annotations

import json

from areal_flow.audit.findings import Report
from pipelines.cli.tables import print_table
from pipelines.cli.terminal import make_console


def print_json(report: Report) -> None:
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
