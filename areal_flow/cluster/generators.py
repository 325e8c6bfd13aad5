"""What the driver has generators do between rollouts: load weights, and leave a GPU to the trainer.

A generator that does not do so in time is replaced; the new process loads the newest weights. Where
a trainer and generators share one GPU in turns:

| who                                   | waits for                     | unblocked by       |
|---------------------------------------|-------------------------------|--------------------|
| the trainer's turn                    | a generator's start or waking | its end            |
|                                       | all generators, to sleep      | them; 30 s         |
| a generator that is to start, to wake | the trainer's turn            | its end; a new run |
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence, Set
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from areal_flow.cluster import generator_tasks
from areal_flow.cluster.pool import WorkerPool
from areal_flow.cluster.registry import WorkerRecord
from areal_flow.cluster.worker import ENGINE_METRIC
from areal_flow.config.cluster import SLOW_STORAGE_BYTES_PER_S
from areal_flow.core.concurrency import all_of
from areal_flow.core.machine import ALONE, gpu_lock
from areal_flow.core.types import ServedWeights

REPLY_TIMEOUT_S = 30.0
"""How long a generator may take to reply, beside what it has to read."""
CHECK_REPLY_EVERY_S = 1.0
MAX_READING_HOSTS = 16
"""Hosts that read new weights at a time, enough for most shared storage to be busy."""


class PublishedWeights(Protocol):
    """The driver's end of a channel."""

    def publish(self, version: int) -> None:
        """Make staged weights the newest."""

    def num_bytes(self, version: int) -> int:
        """Return the size of a published version."""


class DaskWeights:
    """Publishes in the channel, then asks every generator to load.

    From shared storage few hosts read at a time, since all would slow each other down until the
    last has it. The generators of a host load together, so that it reads once.
    """

    def __init__(self, channel: PublishedWeights, pool: WorkerPool) -> None:
        self._channel = channel
        self._pool = pool
        self._forked: dict[int, set[str]] = {}

    def note_restored(self, version: int, served_hash: str) -> None:
        """Accept these weights of a version, too: a restored trainer has published them."""
        self._forked.setdefault(version, set()).add(served_hash)

    async def publish(self, version: int) -> None:
        await asyncio.shield(asyncio.to_thread(self._channel.publish, version))

    async def load_everywhere(self, version: int, served_hash: str) -> list[ServedWeights]:
        """Return when all generators that are not silent have loaded, also those that leave.

        `liveness` replaces a silent one; the new process loads the newest weights. Each may take
        30 s + 1 s for 20 MB, from when its host may read.
        """
        hosts = defaultdict[str, list[WorkerRecord]](list)
        for record in self._pool.registry.running("generator"):
            hosts[self._pool.host(record)].append(record)
        num_bytes = await asyncio.to_thread(self._channel.num_bytes, version)
        timeout_s = REPLY_TIMEOUT_S + num_bytes / SLOW_STORAGE_BYTES_PER_S
        turns = asyncio.Semaphore(MAX_READING_HOSTS)
        load = partial(self._load, version, served_hash, timeout_s=timeout_s)
        loads = await all_of(_load_on_host(turns, load, records) for records in hosts.values())
        return [served for served in chain.from_iterable(loads) if served]

    async def _load(
        self,
        version: int,
        served_hash: str,
        record: WorkerRecord,
        has_read: asyncio.Event,
        *,
        timeout_s: float,
    ) -> ServedWeights | None:
        """Wait for one generator; replace it if it loads other weights than the trainer's."""
        address = record.address

        def drained_s() -> float:
            if seconds := self._drained_s(address):
                has_read.set()
            return seconds

        load = await reply_of(
            self._pool,
            record,
            generator_tasks.load_weights,
            version,
            timeout_s=timeout_s,
            progress=drained_s,
        )
        has_read.set()
        accepted = {served_hash, *self._forked.get(version, ())}
        served, refusal = _acknowledged(load, version, accepted)
        if refusal and not record.is_silent:
            await self._pool.replace(address, why=refusal)
        return served

    def _drained_s(self, address: str) -> float:
        """Return for how long a generator has decoded, if its weights wait for completions; or 0.

        A heartbeat carries both.
        """
        worker = self._pool.scheduler.workers.get(address)
        engine = worker.metrics.get(ENGINE_METRIC) if worker else None
        return engine["busy_seconds_total"] if engine and engine.get("draining") else 0.0


async def _load_on_host(
    turns: asyncio.Semaphore,
    load: Callable[[WorkerRecord, asyncio.Event], Coroutine[Any, Any, ServedWeights | None]],
    records: Sequence[WorkerRecord],
) -> list[ServedWeights | None]:
    """Load on all generators of a host, whose turn ends when all have read the weights."""
    async with asyncio.TaskGroup() as group, turns:
        reads = [asyncio.Event() for _ in records]
        loads = [
            group.create_task(load(record, has_read))
            for record, has_read in zip(records, reads, strict=True)
        ]
        for has_read in reads:
            await has_read.wait()
    return [task.result() for task in loads]


async def reply_of(
    pool: WorkerPool,
    record: WorkerRecord,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = REPLY_TIMEOUT_S,
    progress: Callable[[], float] = lambda: 0.0,
) -> asyncio.Future[Any]:
    """Return a generator's reply; it is not done if the generator is silent, or takes too long.

    Args:
        timeout_s: since the request, or since `progress` last grew.
    """
    run = pool.run(record.address, function, *arguments)
    reply: asyncio.Future[Any] = asyncio.ensure_future(run)
    clock = asyncio.get_running_loop().time
    deadline, last_progress = clock() + timeout_s, 0.0
    try:
        while not reply.done() and clock() < deadline and not record.is_silent:
            await asyncio.wait([reply], timeout=CHECK_REPLY_EVERY_S)
            if (now := progress()) > last_progress:
                deadline, last_progress = clock() + timeout_s, now
    except asyncio.CancelledError:
        reply.cancel()  # else it ends with the cluster, and its error is printed
        raise
    return reply


def _acknowledged(
    load: asyncio.Future[Any], version: int, accepted: Set[str]
) -> tuple[ServedWeights | None, str]:
    """Return what a generator serves, and why it must be replaced; "" if its process died."""
    if not load.done():
        load.cancel()
        return None, f"version {version} was not loaded"
    reply = load.result()
    if isinstance(reply, BaseException) and not isinstance(reply, OSError):
        return None, f"version {version} was not loaded ({reply})"
    if not isinstance(reply, ServedWeights):
        return None, ""
    if reply.policy_version < version:
        return None, f"it serves version {reply.policy_version}, expected {version}"
    if reply.policy_version == version and reply.served_hash not in accepted:
        return None, (
            f"expected weights {' or '.join(sorted(accepted))} of version {version}, as the ledger "
            f"has them, found it serving {reply.served_hash}"
        )
    return reply, ""


class GpuTurns:
    def __init__(self, pool: WorkerPool, processes: Path) -> None:
        """Take the folder of the lock: that of this driver's processes."""
        self._pool = pool
        self._processes = processes

    @asynccontextmanager
    async def of_trainer(self) -> AsyncIterator[None]:
        """Have all generators sleep during the block, and wake unless it fails."""
        async with gpu_lock(self._processes, ALONE):
            await asyncio.gather(*map(self._send_to_sleep, self._generators()))
            yield
        await asyncio.gather(*map(self._wake, self._generators()))

    def _generators(self) -> list[WorkerRecord]:
        return self._pool.registry.present("generator")

    async def _send_to_sleep(self, record: WorkerRecord) -> None:
        reply = await reply_of(self._pool, record, generator_tasks.sleep)
        if not reply.done() or isinstance(reply.result(), Exception):
            reply.cancel()
            await self._pool.replace(record.address, why="it did not leave the GPU to the trainer")

    async def _wake(self, record: WorkerRecord) -> None:
        """Have it go on with the weights that it has; one that cannot is started again."""
        await reply_of(self._pool, record, generator_tasks.load_weights, 0)
