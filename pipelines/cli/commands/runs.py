"""`areal-flow runs`: list runs with their state."""

from __future__ import annotations

import argparse
from typing import Any

from pipelines.cli.commands.settings import refuse_settings


def add_to(commands: Any) -> None:
    """Add `runs` to the command line's grammar."""
    command = commands.add_parser("runs", help="list runs with their state")
    command.set_defaults(run=run)


def run(known: argparse.Namespace, dotted: list[str], began: float) -> int:
    """List the runs."""
    refuse_settings(dotted)
    from pipelines.cli.runs_report import print_runs

    print_runs(known.runs)
    return 0
