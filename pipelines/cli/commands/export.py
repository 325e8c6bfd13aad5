"""`areal-flow export`: write a plain Hugging Face directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pipelines.cli.commands.settings import refuse_settings


def add_to(commands: Any) -> None:
    """Add `export` to the command line's grammar."""
    command = commands.add_parser("export", help="write a plain Hugging Face directory")
    command.add_argument(
        "model", help="a run's name, models:/NAME@ALIAS, or a checkpoint directory"
    )
    command.add_argument("directory", type=Path)
    command.set_defaults(run=run)


def run(known: argparse.Namespace, dotted: list[str], began: float) -> int:
    """Export a policy."""
    refuse_settings(dotted)
    from pipelines.export import export
    from pipelines.models import find_model

    export(find_model(known.runs, known.model, registry=known.registry), known.directory)
    return 0
