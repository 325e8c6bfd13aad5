"""Rolls out groups on generators as Dask tasks; `scoring` scores and writes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pyarrow as pa
from distributed import Client, Future, wait
from distributed.client import FuturesCancelledError

from areal_flow.cluster import generator_tasks
from areal_flow.cluster.pool import WorkerPool
from areal_flow.cluster.scoring import Scoring, ScoringBatcher, task_errors
from areal_flow.core.errors import WorkersLost
from areal_flow.core.pass_rates import HELD_OUT
from areal_flow.core.types import Episode, GroupReceipt
from areal_flow.flow.flow_setup import RetryBudget
from areal_flow.policy.weights.channel import WeightsReader


class DaskRollouts:
    """Each rollout is a task; one task scores and writes all groups that are ready."""

    def __init__(
        self, client: Client, weights: WeightsReader, pool: WorkerPool, *, max_attempts: int
    ) -> None:
        self._client = client
        self._weights = weights
        self._max_attempts = max_attempts
        self._scoring = Scoring(client, pool)
        self._batcher = ScoringBatcher(self._scoring, pool)
        self._pending: dict[str, tuple[Episode, ...]] = {}
        """Rollouts of this turn of the event loop, by the keys of their tasks."""
        self._sending: asyncio.Task[dict[str, Future]]

    async def roll_out(self, episode: Episode, budget: RetryBudget) -> Future:
        suffix = f"{episode.group_id}-{episode.attempt}-{episode.writer_epoch}"
        return await self._roll_out((episode,), budget, f"rollout-{suffix}")

    async def write(self, rows: Future, budget: RetryBudget) -> GroupReceipt:
        return await self._batcher.receipt(rows, budget)

    async def answer(self, episodes: Sequence[Episode], *, name: str) -> pa.Table:
        """Return some groups' scored rows, which are not written to the log.

        Args:
            name: of these answers, unique in this cluster.
        """
        budget = RetryBudget(self._max_attempts)
        task = f"{HELD_OUT}-{name}-{episodes[0].group_id}"
        while True:
            rows = await self._roll_out(tuple(episodes), budget, task)
            try:
                return await self._scoring.table(rows, budget, what=HELD_OUT)
            except WorkersLost as error:
                if not budget.spend(error):
                    raise

    async def _roll_out(
        self, episodes: tuple[Episode, ...], budget: RetryBudget, task: str
    ) -> Future:
        """Roll out some groups, again where a generator dies; a cancelled call cancels the task."""
        while True:
            rows = await self._submit(episodes, f"generator/{task}-{budget.num_collateral}")
            try:
                with self._batcher.counting_rollout(), suppress(FuturesCancelledError):
                    await wait(rows)
                if rows.status != "finished":
                    with task_errors(rows.key):
                        await rows  # raises
                return rows
            except WorkersLost as error:
                if not budget.spend(error):
                    raise
            except asyncio.CancelledError:
                await self._client.cancel([rows])
                raise

    async def _submit(self, episodes: tuple[Episode, ...], key: str) -> Future:
        """Submit all rollouts of one turn of the event loop as one graph.

        A graph of sixteen rollouts costs the driver two thirds of sixteen graphs.
        """
        if not self._pending:
            self._sending = asyncio.create_task(self._send())
        self._pending[key] = episodes
        return (await asyncio.shield(self._sending)).pop(key)

    async def _send(self) -> dict[str, Future]:
        await asyncio.sleep(0)  # other callers of this turn add theirs
        pending, self._pending = self._pending, {}
        rollouts = self._client.map(
            generator_tasks.rollout,
            list(pending.values()),
            [self._weights.newest()] * len(pending),
            key=list(pending),
            resources={"generator": 1},
            pure=False,  # else Dask hashes all prompts
        )
        return dict(zip(pending, rollouts, strict=True))
