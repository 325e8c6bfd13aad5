"""`areal-flow workers`: list, add and remove the workers of a running job."""

from __future__ import annotations

import argparse
from typing import Any

from pipelines.cli.commands.settings import refuse_settings


def add_to(commands: Any) -> None:
    """Add `workers` to the command line's grammar."""
    command = commands.add_parser("workers", help="list, add and remove workers of a running job")
    actions = command.add_subparsers(required=True, metavar="ACTION")
    list_ = actions.add_parser("list", help="every worker: role, process, work, signs of life")
    add = actions.add_parser("add", help="start more workers")
    add.add_argument("--role", choices=["generator", "reward"], required=True)
    add.add_argument("--count", type=int, default=1, help="how many (default: 1)")
    remove = actions.add_parser("remove", help="retire a worker; its work runs again elsewhere")
    for action, run in ((list_, run_list), (add, run_add), (remove, run_remove)):
        action.add_argument("name", metavar="RUN")
        action.set_defaults(run=run)
    remove.add_argument("worker", metavar="NAME", help="as `list` shows it")


def run_list(known: argparse.Namespace, dotted: list[str], began: float) -> int:
    """List workers."""
    refuse_settings(dotted)
    from pipelines.workers import print_workers

    print_workers(known.runs, known.name)
    return 0


def run_add(known: argparse.Namespace, dotted: list[str], began: float) -> int:
    """Start workers."""
    refuse_settings(dotted)
    from pipelines.workers import add

    add(known.runs, known.name, role=known.role, num_workers=known.count)
    return 0


def run_remove(known: argparse.Namespace, dotted: list[str], began: float) -> int:
    """Retire a worker."""
    refuse_settings(dotted)
    from pipelines.workers import remove

    remove(known.runs, known.name, known.worker)
    return 0
