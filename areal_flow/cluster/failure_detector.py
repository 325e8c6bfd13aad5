"""Decides from signs of life which workers hang. A pure state machine without a clock of its own.

Heartbeats come from a worker's event loop, which an import of a large library or a long call into C
can hold up for seconds. So a silent worker counts as hung only when its process uses no processor
time either (it is stopped, or deadlocked), or when it is silent for so long that it does not matter
why. Silence is measured in time that the observer was awake: after a stop of the driver, or a night
of the machine, every worker looks silent, and none is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIN_PROCESSOR_S = 0.05
"""Less than this is what threads use that only wait."""

SILENT_S = 3.0
"""A worker that has not been heard for longer is not waited for."""

LONGEST_LOOK_S = 2.0
"""More than this between two looks means that the observer slept."""


@dataclass(frozen=True, slots=True)
class SignsOfLife:
    """What is seen of a worker from outside.

    `heard_at` is the time of its last heartbeat, by any clock: only whether it changes is looked
    at. `processor_s` is what its process has used so far, or None where nobody can know.
    """

    heard_at: float
    processor_s: float | None


@dataclass(slots=True)
class _Observed:
    heard_at: float
    heard_awake_s: float
    processor_s: float | None
    worked_awake_s: float


class FailureDetector:
    """Remembers when each worker was last heard and last seen at work."""

    def __init__(self, *, silent_after_s: float, lost_after_s: float) -> None:
        """Set the limits.

        Args:
            silent_after_s: a worker that neither spoke nor worked for longer is hung.
            lost_after_s: a worker that did not speak for longer is hung even if it works.
        """
        self._silent_after_s = silent_after_s
        self._lost_after_s = lost_after_s
        self._awake_s = 0.0
        self._looked_at: float | None = None
        self._workers: dict[str, _Observed] = {}

    def observe(self, signs: Mapping[str, SignsOfLife], *, now: float) -> None:
        """Take in one look at all workers; one that is missing from it is forgotten.

        Args:
            signs: by worker.
            now: of a clock that never goes back, in seconds.
        """
        if self._looked_at is not None:
            self._awake_s += min(now - self._looked_at, LONGEST_LOOK_S)
        self._looked_at = now
        self._workers = {key: self._updated(key, seen) for key, seen in signs.items()}

    def silence_s(self, worker: str) -> float:
        """Return for how long a worker has not been heard; 0 for one that is not known."""
        observed = self._workers.get(worker)
        return self._awake_s - observed.heard_awake_s if observed else 0.0

    def hung(self) -> list[str]:
        """Return the workers that hang, as of the latest look."""
        return [worker for worker, observed in self._workers.items() if self._hangs(observed)]

    def forget(self, worker: str) -> None:
        """Begin anew with a worker, as with one that was never seen."""
        self._workers.pop(worker, None)

    def _hangs(self, observed: _Observed) -> bool:
        silent_s = self._awake_s - observed.heard_awake_s
        idle_s = self._awake_s - observed.worked_awake_s
        return min(silent_s, idle_s) > self._silent_after_s or silent_s > self._lost_after_s

    def _updated(self, worker: str, seen: SignsOfLife) -> _Observed:
        before = self._workers.get(worker)
        if before is None or before.heard_at != seen.heard_at:
            return _Observed(seen.heard_at, self._awake_s, seen.processor_s, self._awake_s)
        if _worked(before.processor_s, seen.processor_s):
            before.processor_s, before.worked_awake_s = seen.processor_s, self._awake_s
        return before


def _worked(before_s: float | None, now_s: float | None) -> bool:
    return before_s is not None and now_s is not None and now_s - before_s > MIN_PROCESSOR_S
