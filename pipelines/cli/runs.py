"""`areal-flow runs`, `track`, `ui`, `view`, `logs`, `cost` and `workers`: a run as a whole."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import sys
from collections import Counter
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter, validators

from areal_flow.config import load_recipe
from areal_flow.core.errors import ConfigError, RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import hold_lease, is_held, newest_lease
from areal_flow.core.program import command, how_to_install
from areal_flow.log.directory import find_run, list_runs, observed_state
from pipelines.cli.settings import Flag, Given, Prices
from pipelines.console.run_log import logged_lines
from pipelines.console.tables import Report, Table

if TYPE_CHECKING:
    from areal_flow.cluster.control import WorkerStatus

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
    """Delete a run, its model versions with their aliases, and its MLflow run.

    Args:
        run: Name or directory of a run.
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
    from areal_flow.policy.weights.shared_memory import free_segments
    from areal_flow.tracking.registry import untrack

    check_unheld(layout)
    with hold_lease(layout.writers):
        num_versions = untrack(layout, load_recipe(layout.config))
        for root in layout.weights.glob("[0-9]*"):
            free_segments(root)
        layout.prometheus_target.unlink(missing_ok=True)
        aside = layout.root.with_name(f".removed-{layout.name}")
        shutil.rmtree(aside, ignore_errors=True)  # of a removal that was interrupted
        shutil.rmtree(layout.root.rename(aside))
    return num_versions


def track(
    run: str,
    /,
    *,
    to: Annotated[str | None, Parameter(metavar="URI")] = None,
    sink: str = "",
    folders: Given,
) -> None:
    """Send a run's metrics and models to a tracker that lacks them.

    Args:
        run: Name or directory of a run.
        to: Address of an MLflow server; by default that of the run's recipe.
        sink: mlflow, tensorboard or wandb; by default that of the run's recipe.
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
    """Serve the MLflow UI on 127.0.0.1, opened at the newest run.

    Args:
        port: Port to listen on.
    """
    from areal_flow.tracking.mlflow import default_tracking_uri
    from areal_flow.tracking.mlflow_pages import serve

    if not (database := folders.runs / "mlflow.db").is_file():
        raise RunError(
            f"expected {database}, found none: train first with "
            f"`{command('train', runs=folders.runs)}`"
        )
    _check_free(port)
    print("MLflow is starting, which takes about 10 s", flush=True)
    serve(default_tracking_uri(folders.runs), port=port)


def logs(
    run: str,
    /,
    *,
    worker: str | None = None,
    follow: Annotated[Flag, Parameter(name=("--follow", "-f"))] = False,
    folders: Given,
) -> None:
    """Print the log of a run: messages of its drivers and output of its workers.

    Args:
        run: Name or directory of a run.
        worker: Only lines from or about this worker, such as generator-0.
        follow: Follow the log until the run ends.
    """
    layout = find_run(folders.runs, run)
    if worker and not re.fullmatch(r"(trainer|generator|reward)-\d+", worker):
        raise ConfigError(f"--worker {worker}: expected one such as generator-0 or trainer-0")
    num_read, num_shown, goes_on = Counter[Path](), 0, True
    while goes_on:
        goes_on = follow and observed_state(layout).state == "running"
        for line in logged_lines(layout, num_read):
            if not worker or re.search(rf"\b{worker}(?!\d)", line):
                print(line, flush=follow)
                num_shown += 1
        sleep(0.5 * goes_on)
    if worker and not num_shown:
        raise RunError(f"no line of {layout.log} is of {worker}, or names it")


def view(
    *runs: str,
    port: Annotated[int, Parameter(validator=validators.Number(gte=1, lte=65_535))] = 5006,
    folders: Given,
) -> None:
    """Show runs in a browser on 127.0.0.1, live: curves, groups token by token, lineage, export.

    Args:
        runs: Names or directories of runs; the newest run by default.
        port: Port to listen on.
    """
    if find_spec("panel") is None:
        raise ConfigError(f"`view` needs panel: {how_to_install('view')}")
    layouts = [folders.find(run).whole_run("view") for run in runs]
    if not layouts:
        layouts_by_age = sorted(
            list_runs(folders.runs), key=lambda each: each.config.stat().st_mtime
        )
        layouts = layouts_by_age[-1:]
    if not layouts:
        raise RunError(f"no runs in {folders.runs}: name one, or choose a folder with --runs")
    if len({layout.name for layout in layouts}) < len(layouts):
        raise ConfigError("expected runs of different names: rename a directory, or name it once")
    for layout in layouts:
        load_recipe(layout.config)  # refuses a run of another version's settings
    _check_free(port)
    from pipelines.pages.view import serve

    serve(layouts, port=port)


def cost(
    *runs: str, price: Prices = (), steps: Flag = False, trajectories: int = 0, folders: Given
) -> Report:
    """Break down what runs cost: trained, masked and discarded tokens, failures, idle devices.

    Args:
        runs: Names or directories of runs.
        price: Price per hour, overrides cluster.prices: 2.5 or H100-80GB for a GPU, cpu=0.05 for a
            core, trainer=4 for a device of a role; may be repeated. Without prices: device seconds.
        steps: Also list every step.
        trajectories: Also list this many of the costliest trajectories.
    """
    from areal_flow.log.queries import Run
    from pipelines.costs import parse_prices, report_costs

    prices = parse_prices(price)
    chosen = [Run(folders.find(run).whole_run("cost").root) for run in runs]
    return report_costs(chosen, prices, by_step=steps, num_trajectories=trajectories)


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ConfigError(f"port {port} is taken: choose another with --port N")


workers_group = App(name="workers", help="List, add and remove workers of a running job.")


@workers_group.command(name="list")
def list_workers(run: str, /, *, folders: Given) -> Report:
    """List workers: role, process, work, heartbeat."""
    from areal_flow.cluster import control
    from pipelines.cluster_address import scheduler_of

    statuses = asyncio.run(control.list_workers(*scheduler_of(folders.runs, run)))
    data = {"run": run, "workers": [asdict(status) for status in statuses]}
    return Report(data, [Table([_worker_row(status) for status in statuses])])


@workers_group.command(name="add")
def add_workers(
    run: str,
    /,
    *,
    role: Annotated[Literal["generator", "reward"], Parameter(help="What they do.")],
    count: Annotated[int, Parameter(help="How many.")] = 1,
    folders: Given,
) -> None:
    """Start more workers."""
    from areal_flow.cluster import control
    from pipelines.cluster_address import scheduler_of

    scheduler, network = scheduler_of(folders.runs, run)
    names = asyncio.run(control.add_workers(scheduler, role, count, network))
    print(f"{', '.join(names)} joined {run}")


@workers_group.command(name="remove")
def remove_worker(run: str, worker: str, /, *, folders: Given) -> None:
    """Retire a worker by the name that `list` shows; its work is rescheduled."""
    from areal_flow.cluster import control
    from pipelines.cluster_address import scheduler_of

    scheduler, network = scheduler_of(folders.runs, run)
    asyncio.run(control.remove_worker(scheduler, worker, network))
    print(f"{worker} left {run}; what it was doing runs again elsewhere")


def _worker_row(status: WorkerStatus) -> dict[str, Any]:
    process: dict[str, Any] = {
        "pid": status.pid,
        "address": status.address,
        "slots": status.num_slots,
        "version": status.policy_version,
        "hash": status.served_hash[:12] or None,
        "transfer": _milliseconds(status.transfer_s),
        "stall": _milliseconds(status.stall_s),
        "running": status.num_running,
        "assigned": status.num_assigned,
        "silent": f"{status.silence_s:.0f} s",
    }
    if not status.address:  # a worker without a process
        process = dict.fromkeys(process)
    row = {"worker": status.name, "role": status.role, "state": status.state}
    return {**row, **process, "deaths": status.num_deaths}


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{1000 * seconds:.1f} ms"


COMMANDS = (group, track, ui, view, logs, cost, workers_group)
