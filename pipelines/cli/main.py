"""`areal-flow`: arguments in, an exit code out. Heavy imports wait for the command that needs them.

Exit codes: 0 done; 1 an error, said in one message; 2 wrong usage or settings; 130 and 143 stopped
by SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from areal_flow.errors import ArealFlowError, ConfigError
from pipelines.cli.commands import (
    check,
    doctor,
    evaluate,
    export,
    lineage,
    replay,
    runs,
    train,
    trajectories,
    workers,
)
from pipelines.cli.commands.settings import split_dotted
from pipelines.cli.commands.train import EXIT_CODES

COMMANDS = (
    *(train, evaluate, export, trajectories, lineage, replay, check),
    *(workers, doctor, runs),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors of ours become one message and an exit code."""
    began = monotonic()
    plain, dotted = split_dotted(sys.argv[1:] if arguments is None else arguments)
    known = build_parser().parse_args(plain)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a verifier by import path may lie beside the recipe
    try:
        return int(known.run(known, dotted, began))
    except ConfigError as error:
        print(f"areal-flow: {error}", file=sys.stderr)
        return 2
    except ArealFlowError as error:
        print(f"areal-flow: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError) as stop:
        print("areal-flow: stopped", file=sys.stderr)
        return EXIT_CODES.get(str(stop), EXIT_CODES["SIGINT"])


def build_parser() -> argparse.ArgumentParser:
    """Return the command line's grammar."""
    parser = argparse.ArgumentParser(prog="areal-flow", allow_abbrev=False)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs")
    parser.add_argument("--registry", metavar="URI", help="MLflow's address, for models:/...")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(commands)
    return parser


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
