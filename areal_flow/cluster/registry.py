"""Who belongs to a run: joins, leaves and deaths in, present and condemned workers out. Pure.

A member outlives its processes: a nanny replaces a dead one under the same key. Workers that the
driver started are keyed by name; those that joined from elsewhere by their nanny's address, since
each of their processes may come with another name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_flow.cluster.placement import WorkerPlacement
from areal_flow.cluster.quarantine import Death, QuarantineRule


@dataclass(slots=True)
class Member:
    """One worker, whichever process it runs in at the moment."""

    name: str
    role: str
    num_slots: int
    is_ours: bool
    address: str = ""
    """Empty while no process of it is registered."""
    nanny: str = ""
    """The address of the nanny of one that joined from elsewhere, if it has one."""
    joined_at: float = 0.0
    deaths: list[Death] = field(default_factory=list)
    is_leaving: bool = False
    is_quarantined: bool = False

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


class Members:
    """All members of a run, past ones included. Times are of a clock that never goes back."""

    def __init__(self, rule: QuarantineRule | None = None) -> None:
        self.rule = rule or QuarantineRule()
        self._by_key: dict[str, Member] = {}

    def all(self) -> list[Member]:
        """Return every member, first come first."""
        return list(self._by_key.values())

    def present(self, role: str) -> list[Member]:
        """Return who is registered and wanted."""
        return [m for m in self._by_key.values() if m.role == role and m.is_present]

    def expected(self, role: str) -> list[Member]:
        """Return who is there or will be again."""
        return [m for m in self._by_key.values() if m.role == role and m.is_expected]

    def named(self, name: str) -> Member | None:
        """Return the wanted member of this name, if there is one."""
        found = [m for m in self._by_key.values() if m.name == name and m.is_expected]
        return found[-1] if found else None

    def at(self, address: str) -> Member | None:
        """Return the member that is registered with this address."""
        found = [m for m in self._by_key.values() if m.address == address]
        return found[0] if found else None

    def place(self, placement: WorkerPlacement) -> Member:
        """Note a worker that the driver is about to start, and return it."""
        member = Member(placement.name, placement.role, placement.num_slots, is_ours=True)
        self._by_key[placement.name] = member
        return member

    def joined(self, newcomer: Member, *, now: float) -> Member:
        """Note that a process has registered; return whose it is, `newcomer` if nobody's."""
        ours = self._by_key.get(newcomer.name)
        key = newcomer.name if ours else newcomer.nanny or newcomer.address
        member = self._by_key.setdefault(key, newcomer)
        member.name, member.address, member.joined_at = newcomer.name, newcomer.address, now
        return member

    def left(self, member: Member) -> None:
        """Note that its process is registered no more."""
        member.address = ""

    def died(self, member: Member, cause: str, *, now: float) -> bool:
        """Note a death that nobody asked for; return whether this was once too often."""
        lived_s = now - member.joined_at if member.joined_at else 0.0
        member.deaths.append(Death(lived_s, cause))
        member.joined_at = 0.0
        if not self.rule.condemns(member.deaths):
            return False
        member.is_quarantined = True
        return True
