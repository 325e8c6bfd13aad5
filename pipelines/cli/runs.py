"""`areal-flow runs`: lists runs, and removes one."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import App, Parameter

from areal_flow.errors import ConfigError
from areal_flow.run.directory import find_run, observed_state
from pipelines.cli.settings import Flag, Given
from pipelines.console.tables import Report

group = App(name="runs", help="List runs with their state; `runs remove` removes one.")


@group.default
def list_(*, folders: Given) -> Report:
    """List runs with their state."""
    from pipelines.cli.reports import report_runs

    return report_runs(folders.runs)


@group.command
def remove(
    run: str,
    /,
    *,
    yes: Annotated[Flag, Parameter(help="Do not ask.")] = False,
    folders: Given,
) -> int:
    """Delete a run with its model versions, their aliases and its MLflow run.

    Args:
        run: A run's name, or its directory.
    """
    from pipelines.remove import check_unheld, remove_run

    layout = find_run(folders.runs, run)
    check_unheld(layout)
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"expected --yes to remove run {run}: there is no terminal to ask on")
        state = observed_state(layout).state
        question = f"Remove run {run} ({state}) in {layout.root} and its model versions? [y/N] "
        if input(question).strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return 1
    num_versions = remove_run(layout)
    print(f"removed run {run} and its model versions: {num_versions}")
    return 0


COMMANDS = (group,)
