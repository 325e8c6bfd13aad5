"""`areal-flow check`: audit a run from its directory alone."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pipelines.cli.commands.settings import refuse_settings


def add_to(commands: Any) -> None:
    """Add `check` to the command line's grammar."""
    command = commands.add_parser(
        "check", help="audit a run: token accounting, hashes, versions, orphans"
    )
    command.add_argument("name", metavar="RUN", help="a run's name, or its directory")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=run)


def run(known: argparse.Namespace, dotted: list[str], began: float) -> int:
    """Audit a run; 0 if nothing is wrong with it, else 1."""
    refuse_settings(dotted)
    from areal_flow.audit.run import check_run
    from pipelines.cli.check_report import print_check
    from pipelines.run_directory import find_run

    report = check_run(find_run(known.runs, known.name))
    if known.json:
        print(json.dumps(report.as_json()))
    else:
        print_check(report)
    return 0 if report.clean else 1
