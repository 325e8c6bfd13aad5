"""Remembers a run's workers and their deaths, and decides which are quarantined.

A state machine that imports no Dask and starts no process. `Executions` records which task each
process of a reward worker executes. Dask knows which tasks a dead worker had, but most of them only
waited. So each process writes the key of every task that it begins to its own file, in a folder
that workers and driver share.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from areal_flow.cluster.placement import WorkerPlacement

NUM_EARLY_DEATHS = 3
"""A worker is quarantined after so many early deaths in a row."""
NUM_DEATHS_OVER_TASKS = 12
"""Or after so many deaths in a row during tasks, in processes that ended no task. One group that
kills workers causes ten: two with others, two alone, and two for each of its first three rows."""
EARLY_S = 15.0
"""A worker that lived for less died early."""

SILENT_S = 3.0
"""Nobody waits for a worker whose heartbeat is overdue for longer."""
SILENT = "silent for"
"""The beginning of the cause when `liveness` kills a worker."""
UNREACHABLE = "ssh ended"
"""The beginning of the cause when the connection to a worker's host ended, or was never made."""


@dataclass(frozen=True, slots=True)
class Execution:
    """The last task of one process."""

    key: str = ""
    """Empty while it executes none."""
    num_ended: int = 0
    """Tasks that the process has ended."""


class Executions:
    """The files of all processes of one driver's life."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, process: str, execution: Execution) -> None:
        (self._folder / process).write_text(f"{execution.num_ended} {execution.key}")

    def last(self, process: str) -> Execution:
        with suppress(OSError, ValueError):
            num_ended, _, key = (self._folder / process).read_text().partition(" ")
            return Execution(key, int(num_ended))
        return Execution()

    def num_ends(self, key: str) -> int:
        """Return how many processes ended while they executed a task.

        Args:
            key: the beginning of its keys; it does not run now.
        """
        processes = list(self._folder.glob("*"))
        return sum(self.last(process.name).key.startswith(key) for process in processes)


@dataclass(frozen=True, slots=True)
class Death:
    """One unexpected end of a worker's process."""

    lived_s: float
    """From when it joined; 0 if it never did."""
    cause: str
    last: Execution = field(default_factory=Execution)
    """A task that it executed may be the cause; see `KillsWorkers`."""

    @property
    def limit(self) -> int:
        """Return how many such deaths in a row quarantine a worker; 0: any number is allowed."""
        if self.last.key:  # the task is given up instead
            return 0 if self.last.num_ended else NUM_DEATHS_OVER_TASKS
        return NUM_EARLY_DEATHS if self.lived_s < EARLY_S else 0


@dataclass(slots=True)
class WorkerRecord:
    """One worker; its processes follow each other under one name."""

    placement: WorkerPlacement
    address: str = ""
    """Empty while no process of it is registered."""
    joined_at: float = 0.0
    silence_s: float = 0.0
    """For how long its heartbeat was overdue at the latest look."""
    deaths: list[Death] = field(default_factory=list)
    process: str = ""
    """The identity of its latest process."""
    is_leaving: bool = False

    @property
    def name(self) -> str:
        return self.placement.name

    @property
    def role(self) -> str:
        return self.placement.role

    @property
    def title(self) -> str:
        return "reward worker" if self.role == "reward" else self.role

    @property
    def is_silent(self) -> bool:
        return self.silence_s > SILENT_S

    @property
    def is_wanted(self) -> bool:
        """Whether a process that ends is started again."""
        return not self.is_leaving and not self.is_quarantined

    def died(self, cause: str, *, now: float, last: Execution | None = None) -> None:
        """Note an unexpected death; after too many the worker is quarantined."""
        lived_s = now - self.joined_at if self.joined_at else 0.0
        self.deaths.append(Death(lived_s, cause, last or Execution()))
        self.joined_at = 0.0

    @property
    def is_quarantined(self) -> bool:
        limit = self.deaths[-1].limit if self.deaths else 0
        return 0 < limit <= len(self.deaths) and {d.limit for d in self.deaths[-limit:]} == {limit}

    def why_quarantined(self) -> str:
        latest = self.deaths[-self.deaths[-1].limit :]
        lives = ", ".join(f"{death.lived_s:.1f}" for death in latest)
        return (
            f"{self.name} is quarantined: this {self.title} died {len(latest)} times in a row, "
            f"{lives} s after it joined ({latest[-1].cause}). "
            f"{advice(self.title, latest[-1].cause)}"
        )


def advice(worker: str, cause: str) -> str:
    """Return what to look at, for a worker's title and the cause of its latest death."""
    if worker != "reward worker" or "signal 9" in cause:
        return "Look at what its process said last, and at its machine's memory"
    if cause.startswith(SILENT):
        return (
            "A verifier or a tool hangs: look for an `async` one that computes or waits without "
            "`await`, or for native code that does not return, and give it a time limit"
        )
    if "signal" in cause:
        return "A verifier or a tool crashes in native code: look at what its process said last"
    return "A verifier or a tool ends its process, as os._exit does: have it return or raise"


def version_conflict(worker: Mapping[str, str], driver: Mapping[str, str]) -> str:
    """Return in words how a worker's software differs from the driver's; empty if it does not."""
    differing = [
        f"{name} {worker.get(name, 'unknown')} (expected {version})"
        for name, version in driver.items()
        if worker.get(name) != version
    ]
    return f"it has {', '.join(differing)}: install the driver's there" if differing else ""


class WorkerRegistry:
    """All workers of a run, past ones included. Times are of a monotonic clock."""

    def __init__(self) -> None:
        self._by_name: dict[str, WorkerRecord] = {}

    def all(self) -> list[WorkerRecord]:
        return list(self._by_name.values())

    def expected(self, role: str) -> list[WorkerRecord]:
        return [record for record in self.all() if record.role == role and record.is_wanted]

    def present(self, role: str) -> list[WorkerRecord]:
        return [record for record in self.expected(role) if record.address]

    def running(self, role: str) -> list[WorkerRecord]:
        """Return workers that have a process and so hold devices, including leaving ones."""
        return [record for record in self.all() if record.role == role and record.address]

    def named(self, name: str) -> WorkerRecord | None:
        record = self._by_name.get(name)
        return record if record and record.is_wanted else None

    def at(self, address: str) -> WorkerRecord | None:
        return next((record for record in self.all() if record.address == address), None)

    def place(self, placement: WorkerPlacement) -> WorkerRecord:
        record = self._by_name[placement.name] = WorkerRecord(placement)
        return record

    def joined(self, name: str, address: str, *, process: str, now: float) -> WorkerRecord | None:
        """Note that a process has registered; return its worker, or None if it was not placed."""
        if record := self._by_name.get(name):
            record.address, record.process, record.joined_at = address, process, now
            record.silence_s = 0.0
        return record
