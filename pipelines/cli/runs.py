"""`areal-flow runs`, `track` and `ui`: lists and removes runs, and shows them in MLflow."""

from __future__ import annotations

import shutil
import socket
import sys
from typing import Annotated

from cyclopts import App, Parameter, validators

from areal_flow.command import command
from areal_flow.config import load_recipe
from areal_flow.errors import ConfigError, RunError
from areal_flow.run.directory import find_run, observed_state
from areal_flow.run.layout import RunLayout
from areal_flow.run.lease import hold_lease, is_held, newest_lease
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


def check_unheld(layout: RunLayout) -> None:
    lease = newest_lease(layout.writers)
    if lease and is_held(layout.writers, lease.writer_epoch):
        raise RunError(f"run {layout.name} is held by {lease}: stop it first; nothing was removed")


def remove_run(layout: RunLayout) -> int:
    """Remove a run that no driver holds; return how many model versions it had.

    The registry's entries go first: if it cannot be reached, the run is still there. The directory
    is renamed before it is deleted: one that is half removed must not look like a run.
    """
    from areal_flow.tracking.registry import untrack
    from areal_flow.weights.shared_memory import free_segments

    check_unheld(layout)
    with hold_lease(layout.writers):
        num_versions = untrack(layout, load_recipe(layout.config))
        for root in layout.weights.glob("[0-9]*"):
            free_segments(root)
        shutil.rmtree(layout.root.rename(layout.root.with_name(f".removed-{layout.name}")))
    return num_versions


def track(
    run: str,
    /,
    *,
    to: Annotated[str | None, Parameter(metavar="URI")] = None,
    sink: str = "",
    folders: Given,
) -> None:
    """Deliver what a tracker lacks of a run's metrics and models.

    Args:
        run: A run's name, or its directory.
        to: The address of an MLflow server; that of the run's recipe by default.
        sink: mlflow, tensorboard or wandb; by default what the run's recipe names.
    """
    from areal_flow.tracking.registry import track

    layout = folders.find(run).whole_run("track")
    uri = to or load_recipe(layout.config).tracking.uri
    num_steps = track(layout.root, uri, sink=sink)
    place = sink or uri or "the database beside the runs"
    print(f"{place} has all of {run} now; it lacked {num_steps} steps")


def ui(
    *,
    port: Annotated[int, Parameter(validator=validators.Number(gte=1, lte=65_535))] = 5000,
    folders: Given,
) -> None:
    """Serve the MLflow UI on 127.0.0.1, opened where the newest run is.

    Args:
        port: To listen on.
    """
    from areal_flow.tracking.mlflow_pages import serve
    from areal_flow.tracking.model_registry import default_tracking_uri

    if not (database := folders.runs / "mlflow.db").is_file():
        raise RunError(
            f"expected {database}, found none: train first with "
            f"`{command('train', runs=folders.runs)}`"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ConfigError(f"port {port} is taken: choose another with --port N")
    print("MLflow is starting, which takes about 10 s", flush=True)
    serve(default_tracking_uri(folders.runs), port=port)


COMMANDS = (group, track, ui)
