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
from collections.abc import AsyncIterator, Callable, Set
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from distributed import Client

from areal_flow.cluster import generator_tasks
from areal_flow.cluster.pool import WorkerPool
from areal_flow.cluster.registry import WorkerRecord
from areal_flow.cluster.worker import ENGINE_METRIC
from areal_flow.config.cluster import SLOW_STORAGE_BYTES_PER_S
from areal_flow.core.machine import ALONE, gpu_lock
from areal_flow.core.types import ServedWeights

REPLY_TIMEOUT_S = 30.0
"""How long a generator may take to reply, beside what it has to read."""
CHECK_REPLY_EVERY_S = 0.5


class PublishedWeights(Protocol):
    """The driver's end of a channel."""

    def publish(self, version: int) -> None:
        """Make staged weights the newest."""

    def num_bytes(self, version: int) -> int:
        """Return the size of a published version."""


class DaskWeights:
    """Publishes in the channel, then asks every generator to load."""

    def __init__(self, client: Client, channel: PublishedWeights, pool: WorkerPool) -> None:
        self._client = client
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

        `liveness` replaces a silent one; the new process loads the newest weights.
        """
        generators = self._pool.registry.running("generator")
        num_bytes = await asyncio.to_thread(self._channel.num_bytes, version)
        timeout_s = REPLY_TIMEOUT_S + num_bytes / SLOW_STORAGE_BYTES_PER_S
        loads = (self._load(version, served_hash, record, timeout_s) for record in generators)
        return [served for served in await asyncio.gather(*loads) if served]

    async def _load(
        self, version: int, served_hash: str, record: WorkerRecord, timeout_s: float
    ) -> ServedWeights | None:
        """Wait for one generator; replace it if it loads other weights than the trainer's."""
        address = record.address
        load = await reply_of(
            self._client,
            record,
            generator_tasks.load_weights,
            version,
            timeout_s=timeout_s,
            progress=partial(self._drained_s, address),
        )
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


async def reply_of(
    client: Client,
    record: WorkerRecord,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = REPLY_TIMEOUT_S,
    progress: Callable[[], float] = lambda: 0.0,
) -> asyncio.Future[dict[str, Any]]:
    """Return a generator's reply; it is not done if the generator is silent, or takes too long.

    Args:
        timeout_s: since the request, or since `progress` last grew.
    """
    run = client.run(function, *arguments, workers=[record.address], on_error="return")
    reply: asyncio.Future[dict[str, Any]] = asyncio.ensure_future(run)
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
    load: asyncio.Future[dict[str, Any]], version: int, accepted: Set[str]
) -> tuple[ServedWeights | None, str]:
    """Return what a generator serves, and why it must be replaced; "" if its process died."""
    if not load.done():
        load.cancel()
        return None, f"version {version} was not loaded"
    if load.exception() is not None:
        return None, ""
    for reply in load.result().values():
        if isinstance(reply, BaseException) and not isinstance(reply, OSError):
            return None, f"version {version} was not loaded ({reply})"
        if isinstance(reply, ServedWeights):
            if reply.policy_version < version:
                return None, f"it serves version {reply.policy_version}, expected {version}"
            if reply.policy_version == version and reply.served_hash not in accepted:
                return None, (
                    f"expected weights {' or '.join(sorted(accepted))} of version {version}, as "
                    f"the ledger has them, found it serving {reply.served_hash}"
                )
            return reply, ""
    return None, ""


class GpuTurns:
    def __init__(self, client: Client, pool: WorkerPool, processes: Path) -> None:
        """Take the folder of the lock: that of this driver's processes."""
        self._client = client
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
        reply = await reply_of(self._client, record, generator_tasks.sleep)
        failed = not reply.done() or reply.exception() is not None
        if failed or any(isinstance(result, Exception) for result in reply.result().values()):
            reply.cancel()
            await self._pool.replace(record.address, why="it did not leave the GPU to the trainer")

    async def _wake(self, record: WorkerRecord) -> None:
        """Have it go on with the weights that it has; one that cannot is started again."""
        await reply_of(self._client, record, generator_tasks.load_weights, 0)
