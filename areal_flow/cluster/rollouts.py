"""Runs rollouts on generators, then scores and writes them on reward workers, as Dask tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
from distributed import Client, Future, wait
from distributed.client import FuturesCancelledError

from areal_flow.cluster import generator_tasks, reward_tasks
from areal_flow.cluster.pool import WorkerPool
from areal_flow.cluster.results import KillsWorkers, result_of, run_reward_task, run_task
from areal_flow.errors import ArealFlowError, InfrastructureError
from areal_flow.types import Episode, GroupReceipt, Score
from areal_flow.weights.channel import WeightsReader

logger = logging.getLogger(__name__)

TARGET_TASK_S = 0.25
"""How long a task may score groups: they are written, and committed, when it ends."""

LINGER_S = 0.15
"""How long a group that was rolled out waits for others, to be scored and written with them."""

MAX_RESCORINGS = 2
"""How often completions are scored again, elsewhere, after an error of the infrastructure."""

_HELD_OUT = "held_out"
"""What Dask's pages call the tasks of evaluations, after their roles."""


class DaskRollouts:
    """Runs episodes as tasks: a rollout each, then one to score and write all that are ready."""

    def __init__(self, client: Client, weights: WeightsReader, pool: WorkerPool) -> None:
        self._client = client
        self._submissions = Submissions(client, weights)
        self._scoring = Scoring(client, pool)
        self._ready = ReadyGroups(client, pool)

    async def roll_out(self, episode: Episode) -> tuple[Future, Episode]:
        suffix = f"{episode.group_id}-{episode.attempt}-{episode.writer_epoch}"
        return await self._roll_out((episode,), suffix), episode

    async def write(self, rolled_out: tuple[Future, Episode]) -> GroupReceipt:
        return await self._ready.receipt(*rolled_out)

    async def answer(self, episodes: Sequence[Episode], *, name: str) -> pa.Table:
        """Return some groups' scored rows, which become no part of the log.

        Args:
            name: tells these answers from all others of this cluster.
        """
        episodes, suffix = tuple(episodes), f"{name}-{episodes[0].group_id}"
        rolled_out = await self._roll_out(episodes, suffix, what=_HELD_OUT)
        try:
            return await self._scoring.run(reward_tasks.score, rolled_out, episodes, what=_HELD_OUT)
        except KillsWorkers:
            scores = await self._scoring.row_by_row(rolled_out, episodes)
            score = partial(reward_tasks.score, known=scores)
            return await self._scoring.run(score, rolled_out, episodes, what=_HELD_OUT)

    async def _roll_out(
        self, episodes: tuple[Episode, ...], suffix: str, *, what: str = "rollout"
    ) -> Future:
        """Roll out some groups; if that is cancelled here, it is on the cluster."""
        rolled_out = await self._submissions.submit(episodes, key=f"generator/{what}-{suffix}")
        try:
            with self._ready.counting_rollout(), suppress(FuturesCancelledError):
                await wait(rolled_out)
            if rolled_out.status != "finished":
                await result_of(rolled_out)  # which says in our words what became of it
            return rolled_out
        except asyncio.CancelledError:
            await self._client.cancel([rolled_out])
            raise


class Scoring:
    """Runs tasks that score; again, on other workers, after an error of the infrastructure."""

    def __init__(self, client: Client, pool: WorkerPool) -> None:
        self._client = client
        self._pool = pool

    async def run(
        self, function: Callable[..., Awaitable[Any]], *arguments: Any, what: str = ""
    ) -> Any:
        """Run a task on a reward worker; the last try keeps what has no verdict, without a score.

        The retries have different workers, so that at least one of two is not where the first
        try was. Who that was the driver does not know.
        """
        reward_workers = self._pool.registry.present("reward")
        task, options = (self._client, self._pool.executions), dict[str, Any](what=what)
        for worker in reward_workers[:MAX_RESCORINGS]:
            try:
                return await run_reward_task(
                    *task, function, *arguments, is_last_try=False, **options
                )
            except InfrastructureError as error:
                logger.warning("no verdict, and so asked again: %s", error)
            options |= {"workers": [worker.address], "allow_other_workers": True}
        return await run_reward_task(*task, function, *arguments, is_last_try=True, **options)

    async def row_by_row(self, table: Future, episodes: Sequence[Episode]) -> list[Score]:
        """Score each row by a task of its own: one over which workers die fails alone.

        One after the other, since a worker that dies takes all tasks with it that it has.
        """
        killed, scores = reward_tasks.SCORING_KILLS, list[Score]()
        num_rows = await run_task(self._client, len, table, resource="generator", num_slots=0)
        for row in range(num_rows):
            if scores == [killed] * reward_tasks.MAX_KILLING_ROWS:
                return [killed] * num_rows
            try:
                scores.append(await self.run(reward_tasks.score_row, table, row, episodes))
            except KillsWorkers:
                logger.warning("reward workers died over row %d of a task", row)
                scores.append(killed)
        return scores


class Submissions:
    """Sends the rollouts that one turn of the event loop asks for as one graph.

    A graph of sixteen costs the driver two thirds of what sixteen graphs do.
    """

    def __init__(self, client: Client, weights: WeightsReader) -> None:
        self._client = client
        self._weights = weights
        self._asked: dict[str, tuple[Episode, ...]] = {}
        self._sending: asyncio.Task[dict[str, Future]]

    async def submit(self, episodes: tuple[Episode, ...], *, key: str) -> Future:
        """Return the rollout of some groups, as Dask has it, once it is sent."""
        if not self._asked:
            self._sending = asyncio.create_task(self._send())
        self._asked[key] = episodes
        return (await asyncio.shield(self._sending)).pop(key)

    async def _send(self) -> dict[str, Future]:
        await asyncio.sleep(0)  # while the others of this turn ask
        asked, self._asked = self._asked, {}
        rollouts = self._client.map(
            generator_tasks.rollout,
            list(asked.values()),
            [self._weights.newest()] * len(asked),
            key=list(asked),
            resources={"generator": 1},
        )
        return dict(zip(asked, rollouts, strict=True))


class ReadyGroups:
    """Has groups that were rolled out scored and written, a task for all that are ready together.

    A group waits a moment for others, unless none is on its way. There are as many tasks at a time
    as reward workers. Each takes as many groups as the last one would have scored within
    `TARGET_TASK_S`, or scores at the same time: many of quick verdicts, one of slow ones.
    """

    def __init__(self, client: Client, pool: WorkerPool) -> None:
        self._scoring = Scoring(client, pool)
        self._pool = pool
        self._waiting: list[_Rollout] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_start: asyncio.TimerHandle | None = None
        self._num_rolling_out = 0
        self._num_together = 1.0
        self._num_at_once = 1

    @contextmanager
    def counting_rollout(self) -> Iterator[None]:
        self._num_rolling_out += 1
        try:
            yield
        finally:
            self._num_rolling_out -= 1

    async def receipt(self, rolled_out: Future, episode: Episode) -> GroupReceipt:
        loop = asyncio.get_running_loop()
        receipt: asyncio.Future[GroupReceipt] = loop.create_future()
        self._waiting.append(_Rollout(rolled_out, episode, receipt, loop.time()))
        self._start_soon()
        return await receipt

    def _start_soon(self) -> None:
        """Start when the oldest group has waited long enough, or at once if no other will come."""
        if self._next_start:
            self._next_start.cancel()
        if self._waiting:
            waits_until = self._waiting[0].ready_at + LINGER_S if self._num_rolling_out else 0.0
            self._next_start = asyncio.get_running_loop().call_at(waits_until, self._start)

    def _start(self) -> None:
        """Start a task a free worker, each with its share of what is ready."""
        self._waiting = [rollout for rollout in self._waiting if not rollout.receipt.done()]
        num_workers = max(1, len(self._pool.registry.present("reward")))
        while self._waiting and (free := num_workers - len(self._tasks)) > 0:
            share = -(-len(self._waiting) // free)
            num_taken = min(share, max(self._num_at_once, int(self._num_together)))
            batch, self._waiting = self._waiting[:num_taken], self._waiting[num_taken:]
            task = asyncio.create_task(self._score_and_write(batch))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, batch))

    def _ended(self, batch: Sequence[_Rollout], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            for rollout in batch:
                if not rollout.receipt.done():
                    rollout.receipt.set_exception(error)
        self._start_soon()

    async def _score_and_write(self, batch: Sequence[_Rollout]) -> None:
        groups = await self._receipts(batch)
        for rollout, group in zip(batch, groups, strict=True):
            if rollout.receipt.done():  # its episode was cancelled, since the run ends
                continue
            if isinstance(group, ArealFlowError):
                rollout.receipt.set_exception(group)
            else:
                rollout.receipt.set_result(group)

    async def _receipts(
        self, batch: Sequence[_Rollout], known: Sequence[Score] | None = None
    ) -> list[GroupReceipt | ArealFlowError]:
        """Return what became of each group; one that fails a task fails no other than itself.

        Args:
            known: the scores of the only group, where they are known.
        """
        score_and_write = reward_tasks.score_and_write
        if known:
            score_and_write = partial(score_and_write, known=[known])
        tables = [rollout.table for rollout in batch]
        episodes = [rollout.episode for rollout in batch]
        groups: list[GroupReceipt | ArealFlowError]
        try:
            groups, seconds, self._num_at_once = await self._scoring.run(
                score_and_write, tables, episodes
            )
        except ArealFlowError as error:
            if all(rollout.receipt.done() for rollout in batch):
                return [error] * len(batch)
            if len(batch) > 1:
                return [(await self._receipts([rollout]))[0] for rollout in batch]
            if known is None and isinstance(error, KillsWorkers):
                try:
                    scores = await self._scoring.row_by_row(tables[0], episodes)
                except ArealFlowError as worse:
                    return [worse]
                return await self._receipts(batch, scores)
            return [error]
        self._num_together = len(batch) * TARGET_TASK_S / max(1e-3, seconds)
        began = asyncio.get_running_loop().time() - seconds
        return [
            replace(group, reward_queue_s=max(0.0, began - rollout.ready_at))
            if isinstance(group, GroupReceipt)
            else group
            for rollout, group in zip(batch, groups, strict=True)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Rollout:
    """A group that was rolled out, and who waits for its receipt."""

    table: Future
    episode: Episode
    receipt: asyncio.Future[GroupReceipt]
    ready_at: float
