"""The turns of a trainer and of generators that have one GPU together.

| who                                   | waits for                     | unblocked by       |
|---------------------------------------|-------------------------------|--------------------|
| the trainer's turn                    | a generator's start or waking | its end            |
|                                       | all generators, to sleep      | them; 30 s         |
| a generator that is to start, to wake | the trainer's turn            | its end; a new run |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from distributed import Client

from areal_flow.cluster import generator_tasks
from areal_flow.cluster.pool import WorkerPool
from areal_flow.cluster.registry import WorkerRecord
from areal_flow.cluster.weights_loading import answer_of
from areal_flow.core.gpu_lock import ALONE, gpu_lock


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
        answer = await answer_of(self._client, record, generator_tasks.sleep)
        failed = not answer.done() or answer.exception() is not None
        if failed or any(isinstance(reply, Exception) for reply in answer.result().values()):
            answer.cancel()
            await self._pool.replace(record.address, why="it did not leave the GPU to the trainer")

    async def _wake(self, record: WorkerRecord) -> None:
        """Have it go on with the weights that it has; one that cannot is started again."""
        await answer_of(self._client, record, generator_tasks.load_weights, 0)
