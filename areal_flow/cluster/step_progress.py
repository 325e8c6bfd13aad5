"""Which trainer ranks hang within a step, although their processes send heartbeats.

A rank that waits for another one, in an exchange, is idle too. So a rank hangs only if no rank has
begun fewer exchanges, and neither it nor any other that has begun as few uses a processor. A rank
that is slow uses one, or waits for one where other programs have them; a rank that reads or writes
files is not within a step. And no rank may have begun an exchange lately: the others may have, too,
which their last reports do not say yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from areal_flow.training.replicas import ReplicaGroup

MIN_PROCESSORS = 0.1
"""Threads that only wait, with what answers Dask, use less of a processor."""

LOOK_EVERY_S, LONGEST_LOOK_S = 1.0, 3.0
"""Heartbeats are more frequent; after a longer time between two looks the process was suspended."""


class StepProgress(NamedTuple):
    """How far a rank is, as its heartbeats tell."""

    num_collectives: int
    idle_s: float
    """For how long it has used no processor, within a step and since its latest exchange."""
    seconds_since_collective: float
    """For how long it has begun no exchange."""


class StepClock:
    """Measures for how long a rank has been idle within a step."""

    def __init__(self) -> None:
        self._looked_at = self._began_at = monotonic()
        self._processor_s = 0.0
        self._found = StepProgress(0, 0.0, 0.0)

    def look(self, replicas: ReplicaGroup) -> StepProgress:
        now, before = monotonic(), self._found
        num_collectives = (
            replicas.num_collectives
        )  # the step's thread may begin the next one meanwhile
        if has_begun := num_collectives != before.num_collectives:
            self._began_at = now
        self._found = StepProgress(num_collectives, 0.0, now - self._began_at)
        if has_begun or not replicas.is_within_step:
            self._looked_at = now
            return self._found
        elapsed_s = now - self._looked_at
        if elapsed_s < LOOK_EVERY_S:
            self._found = before
            return before
        processor_s = _processor_s()
        if processor_s - self._processor_s < MIN_PROCESSORS * elapsed_s:
            idle_s = before.idle_s + min(elapsed_s, LONGEST_LOOK_S)
            self._found = self._found._replace(idle_s=idle_s)
        self._looked_at, self._processor_s = now, processor_s
        return self._found


def _processor_s() -> float:
    """Return the processor time of this process and its children, which may compile for it.

    Time that their threads wait for a processor counts, too: others use it on a busy machine.
    """
    own, seconds = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # a child that has ended meanwhile
            seconds += sum(process.cpu_times()[:2]) + _waited_s(process.pid)
    return seconds


def _waited_s(pid: int) -> float:
    """Return for how long a process's threads have waited for a processor; 0.0 except on Linux."""
    seconds = 0.0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # it has ended meanwhile
            seconds += int(thread.read_text().split()[1]) / 1e9
    return seconds


def hung_ranks(
    ranks: Mapping[str, StepProgress], *, num_ranks: int, heartbeat_timeout_s: float
) -> dict[str, float]:
    """Return which ranks of a replica group hang, and for how many seconds. Pure.

    Nothing is known unless all report: one that does not may be what the others wait for.
    """
    is_still = all(each.seconds_since_collective >= LONGEST_LOOK_S for each in ranks.values())
    if len(ranks) < num_ranks or not is_still:
        return {}
    min_collectives = min((each.num_collectives for each in ranks.values()), default=0)
    behind = {name: r.idle_s for name, r in ranks.items() if r.num_collectives == min_collectives}
    return behind if min(behind.values(), default=0.0) > heartbeat_timeout_s else {}
