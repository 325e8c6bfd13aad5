"""`areal-flow lineage`: what a registered model version, or a step of a run, was made from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from areal_flow.errors import ConfigError
from pipelines.cli.commands.settings import refuse_settings


def add_to(commands: Any) -> None:
    """Add `lineage` to the command line's grammar."""
    command = commands.add_parser(
        "lineage", allow_abbrev=False, help="what a model version was made from"
    )
    command.add_argument(
        "model", help="models:/NAME@ALIAS, models:/NAME/VERSION, a run's name or its directory"
    )
    command.add_argument("--step", type=int, metavar="N", help="of a run; the last by default")
    command.add_argument("--json", action="store_true", help="as one JSON object")
    command.add_argument(
        "--to", type=Path, metavar="FILE", help="its trajectories, .parquet/.jsonl"
    )
    command.set_defaults(run=run)


def run(known: argparse.Namespace, dotted: list[str], began: float) -> int:
    """Trace a model version."""
    refuse_settings(dotted)
    if known.step is not None and known.model.startswith("models:/"):
        raise ConfigError("--step goes with a run: a registered version is one step already")
    from pipelines.cli.lineage_report import export_lineage, print_lineage, print_lineage_json
    from pipelines.cli.table_file import refuse_target
    from pipelines.models import trace_model

    if known.to:
        refuse_target(known.to)
    traced = trace_model(known.runs, known.model, step=known.step, registry=known.registry)
    if known.json:
        print_lineage_json(traced)
    elif not known.to:
        print_lineage(traced)
    if known.to:
        export_lineage(traced, path=known.to)
    return int(not all(check.holds for check in traced.checks))
