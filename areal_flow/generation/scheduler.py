"""Decides which completion decodes in which slot, without torch, threads or tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Member:
    """One completion of a group."""

    request_id: str
    index: int


class SlotScheduler:
    """Continuous batching over a fixed number of slots, first come first served.

    Members of a group may start at different times: whoever is next takes a slot that is free.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._waiting: deque[Member] = deque()
        self.running: dict[int, Member] = {}

    def add(self, request_id: str, num_members: int) -> None:
        """Queue all members of a group."""
        self._waiting.extend(Member(request_id, index) for index in range(num_members))

    def has_work(self) -> bool:
        return bool(self._waiting or self.running)

    def admit(self) -> list[tuple[str, list[int]]]:
        """Give free slots to waiting members, in order; return the slots taken by each group.

        A group's prompt is prefilled once for all of its members that start now.
        """
        admitted: list[tuple[str, list[int]]] = []
        while self._free and self._waiting:
            member = self._waiting.popleft()
            slot = self._free.pop()
            self.running[slot] = member
            if not admitted or admitted[-1][0] != member.request_id:
                admitted.append((member.request_id, []))
            admitted[-1][1].append(slot)
        return admitted

    def still_waiting(self, request_id: str) -> bool:
        """Return whether a member of this group has not started yet."""
        return any(member.request_id == request_id for member in self._waiting)

    def finish(self, slot: int) -> None:
        """Free a slot; it can be taken at the very next step."""
        del self.running[slot]
        self._free.append(slot)

    def cancel(self, request_id: str) -> None:
        """Drop a group's waiting members and free its slots."""
        self._waiting = deque(m for m in self._waiting if m.request_id != request_id)
        for slot in [s for s, m in self.running.items() if m.request_id == request_id]:
            self.finish(slot)
