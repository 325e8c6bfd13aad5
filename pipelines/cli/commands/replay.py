"""`areal-flow replay`: compute a recorded step again, and what it would have been."""

from __future__ import annotations

import argparse
from typing import Any

from areal_flow.errors import ConfigError


def add_to(commands: Any) -> None:
    """Add `replay` to the command line's grammar."""
    command = commands.add_parser(
        "replay",
        help="compute a recorded step again, bit for bit, and what it would have been",
        epilog="Exit code 1 if the step differs from the ledger where it must not.",
    )
    command.add_argument("name", metavar="RUN", help="a run's name")
    command.add_argument("--step", type=int, required=True, help="1 to the ledger's newest")
    command.add_argument(
        "--from",
        dest="from_checkpoint",
        type=int,
        metavar="CHECKPOINT_STEP",
        help="start from this checkpoint (default: the newest usable one below the step)",
    )
    command.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="compute the step a second time with this setting; may be given again",
    )
    command.add_argument(
        "--loss", metavar="MODULE:FUNCTION", help="compute it a second time with this loss"
    )
    command.add_argument(
        "--trajectories",
        type=int,
        default=0,
        metavar="K",
        help="show the K trajectories that differ most",
    )
    command.add_argument("--tokens", metavar="TRAJECTORY_ID", help="show a trajectory's tokens")
    command.add_argument("--json", action="store_true", help="print one JSON object instead")
    command.set_defaults(run=run)


def run(known: argparse.Namespace, dotted: list[str], began: float) -> int:
    """Replay a step."""
    if dotted:
        raise ConfigError(f"replay takes settings as --set SECTION.KEY=VALUE, found: {dotted[0]}")
    from areal_flow.recovery.replay import replay_step
    from areal_flow.recovery.replay_settings import import_loss, parse_changes
    from areal_flow.recovery.run_directory import existing_run
    from pipelines.cli.replay_report import print_json, print_report

    layout = existing_run(known.runs, known.name)
    replayed = replay_step(
        layout,
        step=known.step,
        from_checkpoint=known.from_checkpoint,
        changes=parse_changes(known.changes),
        loss=import_loss(known.loss) if known.loss else None,
    )
    print_results = print_json if known.json else print_report
    print_results(layout, replayed, num_trajectories=known.trajectories, tokens_of=known.tokens)
    return 1 if replayed.refused else 0
