"""Remembers which workers belong to a run, their deaths, and which are not started again.

A pure state machine: it knows no Dask, no process and no clock. A record outlives its processes,
since a dead one is started again under the same key. Workers that the driver starts are keyed by
name; those that joined from elsewhere by their nanny's address, since each of their processes may
come with another name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from areal_flow.cluster.death_advice import advice
from areal_flow.cluster.placement import WorkerPlacement


@dataclass(frozen=True, slots=True)
class Death:
    """One end of a worker's process that nobody asked for."""

    lived_s: float
    """From when it joined; 0 if it never did."""
    cause: str


@dataclass(frozen=True, slots=True)
class QuarantineRule:
    """When a worker is not started again: after so many deaths in a row, each so early."""

    num_deaths: int = 3
    early_s: float = 15.0

    def condemns(self, deaths: Sequence[Death]) -> bool:
        """Return whether the latest deaths, oldest first, are too many and all too early."""
        latest = deaths[-self.num_deaths :]
        return len(latest) == self.num_deaths and all(
            death.lived_s < self.early_s for death in latest
        )

    def describe(self, name: str, role: str, deaths: Sequence[Death]) -> str:
        """Return which worker is quarantined, why, and what to look at."""
        latest = deaths[-self.num_deaths :]
        lives = ", ".join(f"{death.lived_s:.1f}" for death in latest)
        return (
            f"{name} is quarantined: this {role} died {len(latest)} times in a row, {lives} s "
            f"after it joined ({latest[-1].cause}). {advice(role, latest[-1].cause)}"
        )


@dataclass(slots=True)
class WorkerRecord:
    """One worker, whichever process it runs in at the moment."""

    name: str
    role: str
    num_slots: int
    placement: WorkerPlacement | None = None
    """How the driver starts it; none of a worker that joined from elsewhere."""
    address: str = ""
    """Empty while no process of it is registered."""
    nanny: str = ""
    """The address of the nanny of one that joined from elsewhere, if it has one."""
    joined_at: float = 0.0
    silence_s: float = 0.0
    """For how long it has not been heard, as of the latest look."""
    deaths: list[Death] = field(default_factory=list)
    is_leaving: bool = False
    is_quarantined: bool = False

    @property
    def is_ours(self) -> bool:
        return self.placement is not None

    @property
    def title(self) -> str:
        """What its role is called in a sentence."""
        return "reward worker" if self.role == "reward" else self.role

    @property
    def is_wanted(self) -> bool:
        return not self.is_leaving and not self.is_quarantined

    @property
    def is_present(self) -> bool:
        return self.is_wanted and bool(self.address)

    @property
    def is_expected(self) -> bool:
        """Whether it is there or will be: one of ours is started again."""
        return self.is_wanted and (self.is_ours or bool(self.address))


class WorkerRegistry:
    """All workers of a run, past ones included. Times are of a clock that never goes back."""

    def __init__(self) -> None:
        self.rule = QuarantineRule()
        self._by_key: dict[str, WorkerRecord] = {}

    def all(self) -> list[WorkerRecord]:
        """Return every record, first come first."""
        return list(self._by_key.values())

    def first(self, role: str) -> WorkerPlacement:
        """Return how the driver started the first worker of this role."""
        return next(m.placement for m in self.all() if m.role == role and m.placement)

    def present(self, role: str) -> list[WorkerRecord]:
        """Return who is registered and wanted."""
        return [m for m in self._by_key.values() if m.role == role and m.is_present]

    def expected(self, role: str) -> list[WorkerRecord]:
        """Return who is there or will be again."""
        return [m for m in self._by_key.values() if m.role == role and m.is_expected]

    def named(self, name: str) -> WorkerRecord | None:
        """Return the wanted record of this name, if there is one."""
        found = [m for m in self._by_key.values() if m.name == name and m.is_expected]
        return found[-1] if found else None

    def at(self, address: str) -> WorkerRecord | None:
        """Return the record that is registered with this address."""
        found = [m for m in self._by_key.values() if m.address == address]
        return found[0] if found else None

    def place(self, placement: WorkerPlacement) -> WorkerRecord:
        """Note a worker that the driver is about to start, and return it."""
        record = WorkerRecord(placement.name, placement.role, placement.num_slots, placement)
        self._by_key[placement.name] = record
        return record

    def joined(self, newcomer: WorkerRecord, *, now: float) -> WorkerRecord:
        """Note that a process has registered; return whose it is, `newcomer` if nobody's."""
        ours = self._by_key.get(newcomer.name)
        key = newcomer.name if ours else newcomer.nanny or newcomer.address
        record = self._by_key.setdefault(key, newcomer)
        record.name, record.address, record.joined_at = newcomer.name, newcomer.address, now
        record.silence_s = 0.0
        return record

    def left(self, record: WorkerRecord) -> None:
        """Note that its process is registered no more."""
        record.address = ""

    def died(self, record: WorkerRecord, cause: str, *, now: float) -> bool:
        """Note a death that nobody asked for; return whether this was once too often."""
        lived_s = now - record.joined_at if record.joined_at else 0.0
        record.deaths.append(Death(lived_s, cause))
        record.joined_at = 0.0
        if not self.rule.condemns(record.deaths):
            return False
        record.is_quarantined = True
        return True
