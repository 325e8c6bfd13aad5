"""The workers of a running job, from another terminal: listed, added, removed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_flow.cluster.control import WorkerStatus, list_workers
from areal_flow.cluster.settings import NetworkSettings
from areal_flow.errors import RunError
from areal_flow.run.directory import find_run, observed_state
from areal_flow.run.durable import replace_file
from areal_flow.run.layout import RunLayout
from pipelines.console.tables import Report, Table

if TYPE_CHECKING:
    from areal_flow.cluster.launch import RunningCluster


@contextmanager
def reachable(layout: RunLayout, cluster: RunningCluster) -> Iterator[None]:
    """Say in the run directory where its scheduler is, while it is there."""
    where = {
        "scheduler": cluster.scheduler,
        "dashboard": cluster.dashboard,
        "pid": os.getpid(),
        "network": cluster.network.model_dump(mode="json"),
    }
    text = json.dumps(where)
    replace_file(layout.cluster, text)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            if layout.cluster.read_text() == text:  # else another driver took over
                layout.cluster.unlink()


def scheduler_of(runs: Path, name: str) -> tuple[str, NetworkSettings]:
    """Return the address of a running run's scheduler, and how to connect to it."""
    layout = find_run(runs, name)
    state = observed_state(layout).state
    if state != "running":
        raise RunError(f"run {name!r} has no workers: it is {state}, not running")
    try:
        found = json.loads(layout.cluster.read_text())
        return found["scheduler"], NetworkSettings.model_validate(found["network"])
    except FileNotFoundError:
        raise RunError(f"run {name!r} has no workers yet: its cluster is being started") from None


def report_workers(runs: Path, name: str) -> Report:
    statuses = asyncio.run(list_workers(*scheduler_of(runs, name)))
    found = {"run": name, "workers": [asdict(status) for status in statuses]}
    return Report(found, [Table([_row(status) for status in statuses])])


def _row(status: WorkerStatus) -> dict[str, Any]:
    """Return a worker as a row; nothing is known of one without a process but its deaths."""
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
    return {
        "worker": status.name,
        "role": status.role,
        "state": status.state,
        **(process if status.address else dict.fromkeys(process)),
        "deaths": status.num_deaths,
    }


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{1000 * seconds:.1f} ms"
