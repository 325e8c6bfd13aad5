"""Which workers are alive: by heartbeats, by processor time, and by progress within a step.

`watch_health` looks once a second and replaces workers that hang. A long import or call into C
delays heartbeats for seconds. So a silent worker counts as hung only if its process neither uses
processor time nor waits for slow storage, or after a longer silence. The processor time of a worker
on another machine comes from its supervisor. Heartbeats are dated when they arrive, so no clock but
the driver's counts. Silence counts only time in which the observer ran: when the driver or the
machine was suspended, no worker hangs. Dask's own rule (`worker-ttl`) goes by wall-clock time, so
it is switched off.

A trainer rank may hang within a step although its process sends heartbeats. A rank that waits for
another one, in a collective operation, is idle too. So a rank hangs only if no rank has begun fewer
of them, and neither it nor any other that has begun as few uses a processor. A rank that is slow
uses one, or waits for one where other programs have them; a rank that reads or writes files is not
within a step. And no rank may have begun one lately: others may have, too, which their last reports
do not say yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import psutil

from areal_flow.cluster.registry import SILENT, WorkerRecord
from areal_flow.config.cluster import ClusterSettings

if TYPE_CHECKING:
    from areal_flow.cluster.pool import WorkerPool
    from areal_flow.training.replicas import ReplicaGroup

logger = logging.getLogger(__name__)

LOST_AFTER_S = 60.0
"""A worker that has not been heard for so long is replaced, even if it works."""
LOOK_EVERY_S = 1.0
"""How often to look at workers; heartbeats, with what a rank reports, are more frequent."""
MIN_PROCESSOR_S = 0.05
"""Threads that only wait use less, between two looks."""
MAX_LOOK_S = 2.0
"""After a longer time between two looks, the observer was suspended."""
MIN_PROCESSORS = 0.1
"""Threads of a rank that only wait, with what answers Dask, use less of a processor."""
MAX_RANK_LOOK_S = 3.0
"""After a longer time between two looks at a rank, its process was suspended."""

STEP_METRIC = "areal_flow_step"
"""How far a trainer rank is within a step: a `StepProgress`, in its heartbeats."""


class ProcessorUse(NamedTuple):
    """What is known of the processor that a worker's process uses."""

    processor_s: float | None = None
    """Of its process so far; None if it cannot be known."""
    waits_for_storage: bool = False
    """Whether its process is in an uninterruptible read or write."""


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
    sample: LivenessSample
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
        self, samples: Mapping[str, LivenessSample], *, now: float, heartbeat_s: float = 0.0
    ) -> dict[str, Silence]:
        """Take in one look at all workers; return the silence of each, by name.

        The time between two heartbeats does not count as silence. Workers that are missing or hang
        are forgotten: they are replaced.
        """
        if self._looked_at is not None:
            self._awake_s += min(now - self._looked_at, MAX_LOOK_S)
        self._looked_at = now
        observed = {name: self._updated(name, sample) for name, sample in samples.items()}
        silences = {name: self._silence(each, heartbeat_s) for name, each in observed.items()}
        self._workers = {name: e for name, e in observed.items() if not silences[name].is_hung}
        return silences

    def _silence(self, observed: _Observed, heartbeat_s: float) -> Silence:
        silent_s = max(0.0, self._awake_s - observed.heard_awake_s - heartbeat_s)
        idle_s = max(0.0, self._awake_s - observed.worked_awake_s - heartbeat_s)
        is_hung = min(silent_s, idle_s) > self._heartbeat_timeout_s or silent_s > self._lost_after_s
        return Silence(silent_s, is_hung)

    def _updated(self, worker: str, sample: LivenessSample) -> _Observed:
        before = self._workers.get(worker)
        if before is None or before.sample.heard_at != sample.heard_at:
            return _Observed(sample, self._awake_s, self._awake_s)
        if sample.progressed_since(before.sample):
            before.sample, before.worked_awake_s = sample, self._awake_s
        return before


class StepProgress(NamedTuple):
    """How far a rank is, as its heartbeats tell."""

    num_collectives: int
    idle_s: float
    """For how long it has used no processor, within a step and since its latest collective."""
    since_collective_s: float
    """For how long it has begun no collective."""


class StepClock:
    """Measures for how long a rank has been idle within a step."""

    def __init__(self) -> None:
        self._looked_at = self._began_at = monotonic()
        self._processor_s = 0.0
        self._progress = StepProgress(0, 0.0, 0.0)

    def look(self, replicas: ReplicaGroup) -> StepProgress:
        now, before = monotonic(), self._progress
        # Read once: the step's thread may begin the next one meanwhile.
        num_collectives = replicas.num_collectives
        if has_begun := num_collectives != before.num_collectives:
            self._began_at = now
        self._progress = StepProgress(num_collectives, 0.0, now - self._began_at)
        if has_begun or not replicas.is_within_step:
            self._looked_at = now
            return self._progress
        elapsed_s = now - self._looked_at
        if elapsed_s < LOOK_EVERY_S:
            self._progress = before
            return before
        processor_s = _processor_s()
        if processor_s - self._processor_s < MIN_PROCESSORS * elapsed_s:
            idle_s = before.idle_s + min(elapsed_s, MAX_RANK_LOOK_S)
            self._progress = self._progress._replace(idle_s=idle_s)
        self._looked_at, self._processor_s = now, processor_s
        return self._progress


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
    is_still = all(each.since_collective_s >= MAX_RANK_LOOK_S for each in ranks.values())
    if len(ranks) < num_ranks or not is_still:
        return {}
    min_collectives = min((each.num_collectives for each in ranks.values()), default=0)
    behind = {name: r.idle_s for name, r in ranks.items() if r.num_collectives == min_collectives}
    return behind if min(behind.values(), default=0.0) > heartbeat_timeout_s else {}


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
    samples = {key: _sample(pool, record) for key, record in watched.items()}
    silences = detector.observe(samples, now=monotonic(), heartbeat_s=pool.heartbeat_s)
    for key, silence in silences.items():
        record = watched[key]
        record.silence_s = silence.silent_s
        if silence.is_hung:
            pool.spawn(pool.kill(record, why=f"{SILENT} {record.silence_s:.0f} s"))
    ranks = {name: progress for name in watched if (progress := _progress(pool, name))}
    hung = hung_ranks(
        ranks, num_ranks=settings.num_trainers, heartbeat_timeout_s=settings.heartbeat_timeout_s
    )
    for key, idle_s in hung.items():
        pool.spawn(pool.kill(watched[key], why=f"{SILENT} {idle_s:.0f} s within a step"))


def _progress(pool: WorkerPool, address: str) -> StepProgress | None:
    worker = pool.scheduler.workers.get(address)
    sample = worker.metrics.get(STEP_METRIC) if worker else None
    return StepProgress(*sample) if sample else None


def _sample(pool: WorkerPool, record: WorkerRecord) -> LivenessSample:
    """Look at a worker; one that starts has no heartbeat, so its work counts as one."""
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
