"""A run's trajectories: a listing, one of them in full, or all that match in a file."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from areal_flow.errors import ConfigError
from areal_flow.layout import RunLayout
from areal_flow.store.browsing import inspect_trajectory
from areal_flow.store.queries import Run
from areal_flow.store.selection import (
    Selection,
    count_trajectories,
    read_rows,
    select_ids,
    stream_rows,
)
from pipelines.cli.table_file import refuse_target, write_table_file
from pipelines.cli.terminal import make_console
from pipelines.cli.trajectory_listing import LISTED, listing
from pipelines.cli.trajectory_report import print_page


def list_trajectories(layout: RunLayout, selection: Selection, *, at: int | None) -> None:
    """Print the selected trajectories, one line each.

    Raises:
        ConfigError: the condition or the order cannot be read.
    """
    run = Run(layout.root)
    with closing(run.database(at=at)) as database:
        num_matching = count_trajectories(database, selection)
        identifiers = select_ids(database, selection)
        extra = [selection.sort] if selection.sort and selection.sort not in LISTED else []
        rows = read_rows(database, identifiers, [*LISTED, *extra]).to_pylist()
    console = make_console()
    if not rows:
        console.print(f"no trajectory of {layout.name} matches")
        return
    console.print(listing(rows, width=console.width, extra=extra))
    more = "" if len(rows) == num_matching else "; --limit K for more"
    console.print(
        f"{len(rows)} of {num_matching} that match{more}; --show # or ID for one in full",
        style="dim",
    )


def show_trajectory(
    layout: RunLayout, selection: Selection, which: str, *, at: int | None, by_token: bool
) -> None:
    """Print one trajectory in full.

    Args:
        which: its id, or its number in the listing that `selection` makes.

    Raises:
        ConfigError: the listing is shorter, or cannot be made.
        RunError: there is no such trajectory.
    """
    run = Run(layout.root)
    identifier = _nth(run, selection, int(which), at=at) if which.isdecimal() else which
    print_page(make_console(), inspect_trajectory(run, identifier, at=at), by_token=by_token)


def export_trajectories(
    layout: RunLayout, selection: Selection, path: Path, *, at: int | None
) -> None:
    """Write every selected trajectory, all columns, to a Parquet or JSONL file.

    Raises:
        ConfigError: the condition, the order or the file's name will not do; nothing was written.
    """
    refuse_target(path)
    run = Run(layout.root)
    with closing(run.database(at=at)) as database:
        count_trajectories(database, selection)
        identifiers = select_ids(database, selection)
        schema = read_rows(database, []).schema
        num_rows = write_table_file(path, stream_rows(database, identifiers), schema)
    print(f"{num_rows} trajectories of {layout.name} in {path}")


def _nth(run: Run, selection: Selection, number: int, *, at: int | None) -> str:
    with closing(run.database(at=at)) as database:
        count_trajectories(database, selection)
        identifiers = select_ids(database, selection)
    if not 1 <= number <= len(identifiers):
        raise ConfigError(
            f"--show {number}: expected a number from 1 to {len(identifiers)}, or an id"
        )
    return identifiers[number - 1]
