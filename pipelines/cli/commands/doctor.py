"""`areal-flow doctor`: what this machine has and what will work."""

from __future__ import annotations

import argparse
from typing import Any

from pipelines.cli.commands.settings import refuse_settings


def add_to(commands: Any) -> None:
    """Add `doctor` to the command line's grammar."""
    command = commands.add_parser("doctor", help="what this machine has and what will work")
    command.set_defaults(run=run)


def run(known: argparse.Namespace, dotted: list[str], began: float) -> int:
    """Look at this machine."""
    refuse_settings(dotted)
    from pipelines.cli.doctor_report import doctor

    return doctor(known.runs)
