"""Looks at every worker's signs of life once a second, and has one that hangs replaced.

Dask's own rule (`worker-ttl`) is switched off in favour of this one. It goes by the clock on the
wall: after the driver was stopped (Ctrl-Z) for a minute it can find every worker silent, and
restart all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

import psutil

from areal_flow.cluster.failure_detector import FailureDetector, SignsOfLife
from areal_flow.cluster.pool import WorkerPool
from areal_flow.cluster.registry import WorkerRecord
from areal_flow.cluster.settings import ClusterSettings

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0


class HealthMonitor:
    """Looks at a pool's workers and has those replaced that hang."""

    def __init__(self, pool: WorkerPool, settings: ClusterSettings) -> None:
        self._pool = pool
        self._detector = FailureDetector(
            silent_after_s=settings.silent_after_s, lost_after_s=settings.worker_ttl_s
        )

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look once a second while this is entered."""
        looking = asyncio.ensure_future(self._keep_looking())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                self._look()
            except Exception:
                logger.exception("the workers could not be looked at")

    def _look(self) -> None:
        watched = self._watched()
        signs = {key: self._signs(record) for key, record in watched.items()}
        self._detector.observe(signs, now=monotonic())
        for key, record in watched.items():
            record.silence_s = self._detector.silence_s(key)
        for key in self._detector.hung():
            self._detector.forget(key)
            why = f"silent for {watched[key].silence_s:.0f} s"
            self._pool.spawn(self._pool.kill(watched[key], why=why))

    def _watched(self) -> dict[str, WorkerRecord]:
        """Return workers that have a process: by its address, or by name while it starts."""
        wanted = [record for record in self._pool.registry.all() if record.is_wanted]
        return {m.address or m.name: m for m in wanted if m.address or self._pool.pid(m)}

    def _signs(self, record: WorkerRecord) -> SignsOfLife:
        """Return a registered worker's heartbeat and work; one that starts only works."""
        worker = self._pool.scheduler.workers.get(record.address)
        if worker is None:
            return SignsOfLife(processor_s(self._pool.pid(record)) or 0.0, None)
        here = worker.host == self._pool.scheduler.ip
        return SignsOfLife(worker.last_seen, processor_s(worker.pid) if here else None)


def processor_s(pid: int | None) -> float | None:
    """Return the processor time that a process of this machine has used, if there is one."""
    try:
        times = psutil.Process(pid).cpu_times() if pid else None
    except psutil.Error:
        return None
    return times.user + times.system if times else None
