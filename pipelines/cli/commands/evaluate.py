"""`areal-flow evaluate`: answer held-out prompts with a policy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pipelines.cli.commands.settings import refuse_settings


def add_to(commands: Any) -> None:
    """Add `evaluate` to the command line's grammar."""
    command = commands.add_parser("evaluate", help="answer held-out prompts with a policy")
    command.add_argument("model", help="a run's name, models:/NAME@ALIAS, or a model directory")
    command.add_argument("--prompts", type=Path, metavar="FILE", help="instead of the run's own")
    command.add_argument("--num-prompts", type=int, help="answer only the first ones")
    command.set_defaults(run=run)


def run(known: argparse.Namespace, dotted: list[str], began: float) -> int:
    """Evaluate a policy."""
    refuse_settings(dotted)
    from pipelines.evaluate import evaluate
    from pipelines.models import find_model

    model = find_model(known.runs, known.model, registry=known.registry)
    return evaluate(model, prompts=known.prompts, limit=known.num_prompts)
