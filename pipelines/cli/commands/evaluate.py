"""`areal-flow evaluate`: answer held-out prompts with a policy."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_flow.types import EvaluationTable
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
    from pipelines.evaluate import evaluate_model
    from pipelines.models import find_model

    model = find_model(known.runs, known.model, registry=known.registry)
    found = evaluate_model(model, prompts=known.prompts, limit=known.num_prompts)
    _print(found.table, model)
    return 0


def _print(found: EvaluationTable, directory: Path) -> None:
    table = Table(title=f"{directory.name}: held-out prompts, one sample each")
    for label in ("difficulty", "prompts", "pass rate", "95% interval", "mean length"):
        table.add_column(label, justify="right")
    for difficulty, (rate, length) in found.by_difficulty.items():
        interval = f"[{rate.low:.3f}, {rate.high:.3f}]"
        table.add_row(
            str(difficulty), str(rate.n), f"{rate.pass_rate:.3f}", interval, f"{length:.1f}"
        )
    Console().print(table, markup=False)
    print(json.dumps(asdict(found.overall)))
