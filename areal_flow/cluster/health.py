"""Replaces workers that hang: it looks at their heartbeats and processor time once a second.

A long import or call into C delays heartbeats for seconds. So a silent worker counts as hung only
if its process neither uses processor time nor waits for slow storage, or after a longer silence.
The processor time of a worker on another machine comes from its supervisor. Heartbeats are dated
when they arrive, so no clock but the driver's counts. Silence counts only time in which the
observer ran: when the driver or the machine was suspended, no worker hangs. Dask's own rule
(`worker-ttl`) goes by wall-clock time, so it is switched off. Trainer ranks that hang within a
step, and whose heartbeats go on, are those of `step_progress`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import psutil

from areal_flow.cluster.launchers.child import ProcessorUse
from areal_flow.cluster.registry import SILENT, WorkerRecord
from areal_flow.cluster.step_progress import StepProgress, hung_ranks
from areal_flow.cluster.worker_context import STEP_METRIC
from areal_flow.config.cluster import ClusterSettings

if TYPE_CHECKING:
    from areal_flow.cluster.pool import WorkerPool

logger = logging.getLogger(__name__)

LOST_AFTER_S = 60.0
"""A worker that has not been heard for so long is replaced, even if it works."""
LOOK_EVERY_S = 1.0

MIN_PROCESSOR_S = 0.05
"""Threads that only wait use less."""

LONGEST_LOOK_S = 2.0
"""After a longer time between two looks, the observer was suspended."""


@dataclass(frozen=True, slots=True)
class LivenessSample:
    """One look at a worker."""

    heard_at: float
    """The time of its last heartbeat, by any clock."""
    processor_s: float | None
    """The processor time of its process so far, if it can be known."""
    waits_for_storage: bool = False
    """Whether its process is in an uninterruptible read or write."""

    def progressed_since(self, earlier: LivenessSample) -> bool:
        if self.waits_for_storage:
            return True
        if self.processor_s is None or earlier.processor_s is None:
            return False
        return self.processor_s - earlier.processor_s > MIN_PROCESSOR_S


class Silence(NamedTuple):
    silent_s: float
    is_hung: bool


@dataclass(slots=True)
class _Observed:
    signs: LivenessSample
    heard_awake_s: float
    worked_awake_s: float


class FailureDetector:
    """Remembers when each worker was last heard and last seen at work. Pure."""

    def __init__(self, *, heartbeat_timeout_s: float, lost_after_s: float) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._lost_after_s = lost_after_s
        self._awake_s = 0.0
        self._looked_at: float | None = None
        self._workers: dict[str, _Observed] = {}

    def observe(
        self, signs: Mapping[str, LivenessSample], *, now: float, heartbeat_s: float = 0.0
    ) -> dict[str, Silence]:
        """Take in one look at all workers; return the silence of each, by name.

        The time between two heartbeats does not count as silence. Workers that are missing or hang
        are forgotten: they are replaced.
        """
        if self._looked_at is not None:
            self._awake_s += min(now - self._looked_at, LONGEST_LOOK_S)
        self._looked_at = now
        observed = {worker: self._updated(worker, seen) for worker, seen in signs.items()}
        silences = {worker: self._silence(known, heartbeat_s) for worker, known in observed.items()}
        self._workers = {w: known for w, known in observed.items() if not silences[w].is_hung}
        return silences

    def _silence(self, observed: _Observed, heartbeat_s: float) -> Silence:
        silent_s = max(0.0, self._awake_s - observed.heard_awake_s - heartbeat_s)
        idle_s = max(0.0, self._awake_s - observed.worked_awake_s - heartbeat_s)
        is_hung = min(silent_s, idle_s) > self._heartbeat_timeout_s or silent_s > self._lost_after_s
        return Silence(silent_s, is_hung)

    def _updated(self, worker: str, seen: LivenessSample) -> _Observed:
        before = self._workers.get(worker)
        if before is None or before.signs.heard_at != seen.heard_at:
            return _Observed(seen, self._awake_s, self._awake_s)
        if seen.progressed_since(before.signs):
            before.signs, before.worked_awake_s = seen, self._awake_s
        return before


async def watch_health(pool: WorkerPool, settings: ClusterSettings) -> None:
    """Look at a pool's workers once a second and replace those that hang; never return."""
    detector = FailureDetector(
        heartbeat_timeout_s=settings.heartbeat_timeout_s, lost_after_s=LOST_AFTER_S
    )
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        try:
            _look(pool, detector, settings)
        except Exception:
            logger.exception("the workers could not be looked at")


def _look(pool: WorkerPool, detector: FailureDetector, settings: ClusterSettings) -> None:
    # A worker has a process by its address, or by its name while it starts.
    watched = {
        record.address or record.name: record
        for record in pool.registry.all()
        if record.is_wanted and (record.address or pool.pid(record))
    }
    signs = {key: _signs(pool, record) for key, record in watched.items()}
    silences = detector.observe(signs, now=monotonic(), heartbeat_s=pool.heartbeat_s)
    for key, silence in silences.items():
        record = watched[key]
        record.silence_s = silence.silent_s
        if silence.is_hung:
            pool.spawn(pool.kill(record, why=f"{SILENT} {record.silence_s:.0f} s"))
    ranks = {name: progress for name in watched if (progress := _progress(pool, name))}
    found_hung = hung_ranks(
        ranks, num_ranks=settings.num_trainers, heartbeat_timeout_s=settings.heartbeat_timeout_s
    )
    for key, idle_s in found_hung.items():
        pool.spawn(pool.kill(watched[key], why=f"{SILENT} {idle_s:.0f} s within a step"))


def _progress(pool: WorkerPool, address: str) -> StepProgress | None:
    worker = pool.scheduler.workers.get(address)
    sample = worker.metrics.get(STEP_METRIC) if worker else None
    return StepProgress(*sample) if sample else None


def _signs(pool: WorkerPool, record: WorkerRecord) -> LivenessSample:
    """Return the signs of a worker; one that starts has no heartbeat, so its work counts as one."""
    worker = pool.scheduler.workers.get(record.address)
    if worker is None:
        return LivenessSample(_processor_use(pool.pid(record)).processor_s or 0.0, None)
    here = worker.host == pool.scheduler.ip
    use = _processor_use(worker.pid) if here else pool.processor_use(record)
    return LivenessSample(worker.last_seen, *use)


def _processor_use(pid: int | None) -> ProcessorUse:
    if pid is None:
        return ProcessorUse()
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            is_in_storage = process.status() == psutil.STATUS_DISK_SLEEP
            return ProcessorUse(times.user + times.system, is_in_storage)
    except psutil.Error:
        return ProcessorUse()
