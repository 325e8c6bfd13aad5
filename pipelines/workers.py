"""The workers of a running job, from another terminal: listed, added, removed."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from areal_flow.cluster.control import WorkerStatus, list_workers
from areal_flow.cluster.placement import place_workers
from areal_flow.config import Recipe, load_recipe
from areal_flow.durable import replace_file
from areal_flow.errors import RunError
from areal_flow.layout import RunLayout
from areal_flow.recovery.run_directory import existing_run, observed_state
from pipelines.cli.tables import make_console, print_table

if TYPE_CHECKING:
    from areal_flow.cluster.launch import RunningCluster

COLUMNS = (
    *("worker", "role", "state", "pid", "address", "slots", "version"),
    *("running", "assigned", "silent", "deaths"),
)


@contextmanager
def reachable(layout: RunLayout, cluster: RunningCluster) -> Iterator[None]:
    """Say in the run directory where its scheduler is, while it is there."""
    where = {"scheduler": cluster.scheduler, "dashboard": cluster.dashboard, "pid": os.getpid()}
    text = json.dumps(where)
    replace_file(layout.cluster, text)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            if layout.cluster.read_text() == text:  # else another driver took over
                layout.cluster.unlink()


def scheduler_of(runs: Path, name: str) -> tuple[RunLayout, str]:
    """Return a running run's layout and its scheduler's address.

    Raises:
        RunError: it does not run, or has no workers yet.
    """
    layout = existing_run(runs, name)
    state = observed_state(layout).state
    if state != "running":
        raise RunError(f"run {name!r} has no workers: it is {state}, not running")
    try:
        return layout, str(json.loads(layout.cluster.read_text())["scheduler"])
    except FileNotFoundError:
        raise RunError(f"run {name!r} has no workers yet: its cluster is being started") from None


def print_workers(runs: Path, name: str) -> None:
    """Print a running run's workers, and how another one joins."""
    layout, scheduler = scheduler_of(runs, name)
    recipe = load_recipe(layout.config)
    statuses = asyncio.run(list_workers(scheduler, recipe.cluster.network))
    print_table(make_console(), COLUMNS, [_row(status) for status in statuses])
    print("\nAnother generator joins from any terminal of this machine with")
    print(f"  {join_command(scheduler, recipe)}")


def _row(status: WorkerStatus) -> list[str]:
    named = [status.name, status.role, status.state]
    if not status.address:
        return [*named, *("-" for _ in COLUMNS[len(named) : -1]), str(status.num_deaths)]
    version = "-" if status.policy_version is None else status.policy_version
    work = status.num_running, status.num_assigned, f"{status.silence_s:.0f} s", status.num_deaths
    return [*named, *map(str, (status.pid, status.address, status.num_slots, version, *work))]


def join_command(scheduler: str, recipe: Recipe) -> str:
    """Return the shell command that starts a generator of this recipe, in plain Dask."""
    network = recipe.cluster.network
    placement = next(placed for placed in place_workers(recipe) if placed.role == "generator")
    variables = [f"{name}={value}" for name, value in sorted(placement.environment.items())]
    dask = Path(sys.executable).with_name("dask")
    flags = {
        "host": network.host,
        "nthreads": placement.num_threads,
        "resources": f"{placement.role}={placement.num_slots}",
        "memory-limit": 0,
    }
    if network.has_tls:
        files = network.tls_ca, network.tls_certificate, network.tls_key
        flags |= zip(("tls-ca-file", "tls-cert", "tls-key"), files, strict=True)
    options = [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
    return shlex.join([*variables, str(dask), "worker", scheduler, *options, "--no-dashboard"])
