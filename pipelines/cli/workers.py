"""`areal-flow workers` and `doctor`: the processes of a running job, and this machine."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from cyclopts import App, Parameter

from areal_flow.config import load_recipe
from pipelines.cli.settings import Given
from pipelines.cli.tables import Report

group = App(name="workers", help="List, add and remove workers of a running job.")


@group.command(name="list")
def list_(run: str, /, *, folders: Given) -> Report:
    """Show every worker: role, process, work, signs of life."""
    from pipelines.workers import report_workers

    return report_workers(folders.runs, run)


@group.command
def add(
    run: str,
    /,
    *,
    role: Annotated[Literal["generator", "reward"], Parameter(help="What they do.")],
    count: Annotated[int, Parameter(help="How many.")] = 1,
    folders: Given,
) -> None:
    """Start more workers."""
    from areal_flow.cluster.control import add_workers
    from pipelines.workers import scheduler_of

    layout, scheduler = scheduler_of(folders.runs, run)
    network = load_recipe(layout.config).cluster.network
    names = asyncio.run(add_workers(scheduler, role, count, network))
    print(f"{', '.join(names)} joined {run}")


@group.command
def remove(run: str, worker: str, /, *, folders: Given) -> None:
    """Retire a worker, named as `list` shows it; its work runs again elsewhere."""
    from areal_flow.cluster.control import remove_worker
    from pipelines.workers import scheduler_of

    layout, scheduler = scheduler_of(folders.runs, run)
    asyncio.run(remove_worker(scheduler, worker, load_recipe(layout.config).cluster.network))
    print(f"{worker} left {run}; what it was doing runs again elsewhere")


def doctor(*, folders: Given) -> Report:
    """Say what this machine has and what will work."""
    from pipelines.cli.doctor_report import report_machine

    return report_machine(folders.runs)


COMMANDS = (group, doctor)
