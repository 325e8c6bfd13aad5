"""Implements the controller's protocols for rollouts, trainer and weights with Dask tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import pyarrow as pa
from distributed import Client, Future, wait
from distributed.client import FuturesCancelledError

from areal_flow.cluster import generator_tasks, reward_tasks, trainer_tasks
from areal_flow.cluster.pool import WorkerPool
from areal_flow.cluster.registry import WorkerRecord
from areal_flow.cluster.results import result_of, run_task
from areal_flow.cluster.trainer_replicas import TrainerReplicas
from areal_flow.errors import ArealFlowError, TrainerLost, TrainingError
from areal_flow.types import Episode, GroupReceipt, StepRequest, StepResult
from areal_flow.weights.channel import WeightsReader, WeightsWriter

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

ACKNOWLEDGE_TIMEOUT_S = 30.0
"""How long a generator may take to load weights before it is replaced and its tasks run again."""

LISTEN_EVERY_S = 0.5

MAX_RESTORATIONS = 3
"""How often the trainer may be lost over one request."""


class DaskRollouts:
    """Runs episodes as graphs: rollout -> score -> write, the last shared by ready groups."""

    def __init__(self, client: Client, weights: WeightsReader) -> None:
        self._client = client
        self._weights = weights
        self._writes = SharedWrites(client)

    async def run(self, episode: Episode) -> GroupReceipt:
        suffix = f"{episode.group_id}-{episode.attempt}-{episode.writer_epoch}"
        async with self._scored((episode,), suffix) as scored:
            return await self._writes.write(scored)

    async def answer(self, episodes: Sequence[Episode], *, name: str) -> pa.Table:
        """Return some groups' scored rows, which become no part of the log.

        Args:
            name: tells these answers from all others of this cluster.

        Raises:
            ArealFlowError: they could not be rolled out or scored.
        """
        async with self._scored(tuple(episodes), f"{name}-{episodes[0].group_id}") as scored:
            return await result_of(scored)

    @asynccontextmanager
    async def _scored(self, episodes: tuple[Episode, ...], suffix: str) -> AsyncIterator[Future]:
        """Roll out and score; what is still going on when the block is cancelled, is cancelled."""
        rolled_out = self._client.submit(
            generator_tasks.rollout,
            episodes,
            self._weights.newest(),
            key=f"rollout-{suffix}",
            resources={"generator": 1},
        )
        scored = self._client.submit(
            reward_tasks.score,
            rolled_out,
            episodes,
            key=f"score-{suffix}",
            resources={"reward": 1},
        )
        try:
            with suppress(FuturesCancelledError):  # `result_of` says so in our words
                await wait(scored)
            if scored.status != "finished":
                await result_of(scored)
            yield scored
        except asyncio.CancelledError:
            await self._client.cancel([rolled_out, scored])
            raise


class SharedWrites:
    """Writes scored groups: one task at a time, for all that are ready when it starts."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._ready: list[tuple[Future, asyncio.Future[GroupReceipt]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def write(self, scored: Future) -> GroupReceipt:
        """Return the receipt of one scored group once it is written.

        Raises:
            ArealFlowError: its batch could not be written.
        """
        receipt: asyncio.Future[GroupReceipt] = asyncio.get_running_loop().create_future()
        self._ready.append((scored, receipt))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_ready())
        return await receipt

    async def _write_ready(self) -> None:
        while self._ready:
            batch, self._ready = self._ready, []
            tables = [scored for scored, _ in batch]
            groups: Sequence[GroupReceipt | ArealFlowError]
            try:
                groups = await run_task(self._client, reward_tasks.write, tables, resource="reward")
            except ArealFlowError as error:
                groups = [error] * len(batch)
            for (_, receipt), written_group in zip(batch, groups, strict=True):
                if receipt.done():
                    continue
                if isinstance(written_group, ArealFlowError):
                    receipt.set_exception(written_group)
                else:
                    receipt.set_result(written_group)


class DaskTrainer:
    """Sends steps and checkpoints to the trainer; restores it if it came back empty."""

    def __init__(self, replicas: TrainerReplicas, restore: Callable[[], Awaitable[str]]) -> None:
        """Take the ranks, and how to restore them to the ledger's head, which returns a hash."""
        self._replicas = replicas
        self._restore = restore

    async def restore(self) -> str:
        """Bring the trainer to the ledger's head, whoever dies meanwhile; return its hash."""
        return await self._persist(self._restore)

    async def step(self, request: StepRequest) -> StepResult:
        return await self._persist(lambda: self._replicas.step(request))

    async def read_ahead(self, trajectory_ids: Sequence[str]) -> None:
        await self._replicas.read_ahead(trajectory_ids)

    async def take_snapshot(self, *, weights_hash: str, next_submission_index: int) -> None:
        """Copy the state with these weights, between two steps, for `write_snapshot`."""
        state = (weights_hash, next_submission_index)
        await self._persist(lambda: self._replicas.lead(trainer_tasks.take_snapshot, *state))

    async def write_snapshot(self, step: int) -> None:
        """Write the snapshot of a step as a checkpoint, beside the steps that follow.

        Raises:
            TrainerLost: the trainer died with it.
            RunError, StorageError: nothing was written.
        """
        await self._replicas.lead(trainer_tasks.write_snapshot, step, num_slots=0)

    async def _persist(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        """Ask the trainer, restored first where that is needed: it may be lost again meanwhile.

        Raises:
            TrainingError: it was lost once too often; the message is the last loss.
        """
        for num_restored in range(MAX_RESTORATIONS + 1):
            try:
                if num_restored and ask is not self._restore:
                    await self._restore()
                return await ask()
            except TrainerLost as lost:
                logger.warning("%s; restoring it from checkpoint and ledger", lost)
                last = lost
        raise TrainingError(
            f"the trainer was restored {MAX_RESTORATIONS} times and lost again: {last}. See what "
            "ends its process, then resume"
        )


class DaskWeights:
    """Publishes in the channel, then asks every generator to load."""

    def __init__(self, client: Client, channel: WeightsWriter, pool: WorkerPool) -> None:
        self._client = client
        self._channel = channel
        self._pool = pool

    async def publish(self, version: int) -> None:
        self._channel.publish(version)

    async def load_everywhere(self, version: int) -> None:
        """Return when all have loaded but those that are silent; see `WorkerPool`.

        The health monitor replaces a silent one. It loads what is newest before its next rollout.
        """
        generators = self._pool.registry.present("generator")
        await asyncio.gather(*(self._load(version, record) for record in generators))

    async def _load(self, version: int, record: WorkerRecord) -> None:
        """Wait for one generator; one that neither loads nor is silent is replaced."""
        address, function = record.address, generator_tasks.load_weights
        load = asyncio.ensure_future(
            self._client.run(function, version, workers=[address], on_error="return")
        )
        clock = asyncio.get_running_loop().time
        deadline = clock() + ACKNOWLEDGE_TIMEOUT_S
        while not load.done() and clock() < deadline and not record.is_silent:
            await asyncio.wait([load], timeout=LISTEN_EVERY_S)
        if not _acknowledged(load) and not record.is_silent:
            await self._pool.replace(address, why=f"version {version} was not loaded")


def _acknowledged(load: asyncio.Future[dict[str, Any]]) -> bool:
    """Return whether a generator loaded; one whose process died meanwhile needs nothing more."""
    if not load.done():
        load.cancel()
        return False
    if load.exception() is not None:
        return True
    results = load.result().values()
    errors = [r for r in results if isinstance(r, BaseException) and not isinstance(r, OSError)]
    for error in errors:
        logger.warning("a generator could not load weights: %s", error)
    return not errors
