"""`areal-flow trajectories`: list a run's trajectories, show one, write them to a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from areal_flow.errors import ConfigError
from pipelines.cli.commands.settings import refuse_settings

DEFAULT_LIMIT = 20


def add_to(commands: Any) -> None:
    """Add `trajectories` to the command line's grammar."""
    command = commands.add_parser(
        "trajectories",
        allow_abbrev=False,
        help="list a run's trajectories, show one, or write them to a file",
        epilog="Columns for --where and --sort: those of schemas/trajectories.py, and prompt, "
        "completion (text), status, step, reason, policy_version, verdict, num_tokens, "
        "num_trained_tokens, num_masked_tokens, staleness, token_versions.",
    )
    command.add_argument("run_name", metavar="RUN", help="a run's name, or its directory")
    command.add_argument(
        "--where", metavar="SQL", help="\"reward = 1 AND completion LIKE '%%9%%'\""
    )
    command.add_argument("--sort", metavar="COLUMN", help="by a column; nulls come last")
    command.add_argument("--descending", action="store_true", help="the largest first")
    command.add_argument("--limit", type=int, metavar="K", help=f"default {DEFAULT_LIMIT}; 0: all")
    command.add_argument("--at", type=int, metavar="STEP", help="as it stood after this step")
    one = command.add_mutually_exclusive_group()
    one.add_argument("--show", metavar="ID", help="one in full: its id, or its # in the listing")
    one.add_argument("--to", type=Path, metavar="FILE", help="a new .parquet or .jsonl of them all")
    command.add_argument("--tokens", action="store_true", help="with --show: a line a token")
    command.set_defaults(run=run)


def run(known: argparse.Namespace, dotted: list[str], began: float) -> int:
    """List, show or write."""
    refuse_settings(dotted)
    if known.limit is not None and known.limit < 0:
        raise ConfigError(f"--limit {known.limit}: expected 0 (all) or more")
    if known.tokens and not known.show:
        raise ConfigError("--tokens goes with --show")
    from areal_flow.store.browsing import Selection
    from pipelines.cli import trajectory_report
    from pipelines.run_directory import find_run

    layout = find_run(known.runs, known.run_name)
    everything = known.limit is None and (known.show or known.to)
    limit = None if everything else DEFAULT_LIMIT if known.limit is None else known.limit or None
    selection = Selection(known.where, known.sort, known.descending, limit)
    asked: dict[str, Any] = {"selection": selection, "at": known.at}
    if known.to:
        trajectory_report.export_trajectories(layout, path=known.to, **asked)
    elif known.show:
        trajectory_report.print_trajectory(layout, which=known.show, by_token=known.tokens, **asked)
    else:
        trajectory_report.list_trajectories(layout, **asked)
    return 0
