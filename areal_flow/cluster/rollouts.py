"""Rolls out groups on generators, then scores and writes them on reward workers, as Dask tasks."""

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
from areal_flow.core.errors import ArealFlowError, InfrastructureError
from areal_flow.core.types import Episode, GroupReceipt, Score
from areal_flow.policy.weights.channel import WeightsReader

logger = logging.getLogger(__name__)

TARGET_TASK_S = 0.25
"""How long a task may score groups: they are written, and committed, when it ends."""

BATCHING_WINDOW_S = 0.15
"""How long a group waits for others, to be scored and written with them."""

MAX_RESCORINGS = 2
"""How often completions are scored again, elsewhere, after an error of the infrastructure."""

HELD_OUT = "held_out"
"""What Dask's pages call the tasks of evaluations, after their roles."""


@dataclass(frozen=True, slots=True, eq=False)
class DaskRolledOut:
    """A group whose rows are on a generator."""

    rows: Future
    _ready: ScoringBatcher

    async def write(self) -> GroupReceipt:
        return await self._ready.receipt(self.rows)


class DaskRollouts:
    """Each rollout is a task; one task scores and writes all groups that are ready."""

    def __init__(self, client: Client, weights: WeightsReader, pool: WorkerPool) -> None:
        self._client = client
        self._submissions = Submissions(client, weights)
        self._scoring = Scoring(client, pool)
        self._ready = ScoringBatcher(client, pool)

    async def roll_out(self, episode: Episode) -> DaskRolledOut:
        suffix = f"{episode.group_id}-{episode.attempt}-{episode.writer_epoch}"
        return DaskRolledOut(await self._roll_out((episode,), suffix), self._ready)

    async def answer(self, episodes: Sequence[Episode], *, name: str) -> pa.Table:
        """Return some groups' scored rows, which are not written to the log.

        Args:
            name: of these answers, unique in this cluster.
        """
        suffix = f"{name}-{episodes[0].group_id}"
        rows = await self._roll_out(tuple(episodes), suffix, what=HELD_OUT)
        try:
            scores = await self._scoring.run(reward_tasks.score, rows, what=HELD_OUT)
        except KillsWorkers:
            score = partial(reward_tasks.score, known=await self._scoring.row_by_row(rows))
            scores = await self._scoring.run(score, rows, what=HELD_OUT)
        return scores

    async def _roll_out(
        self, episodes: tuple[Episode, ...], suffix: str, *, what: str = "rollout"
    ) -> Future:
        """Roll out some groups; a cancelled call cancels the task."""
        rows = await self._submissions.submit(episodes, key=f"generator/{what}-{suffix}")
        try:
            with self._ready.counting_rollout(), suppress(FuturesCancelledError):
                await wait(rows)
            if rows.status != "finished":
                await result_of(rows)  # raises one of our errors
            return rows
        except asyncio.CancelledError:
            await self._client.cancel([rows])
            raise


class Scoring:
    """Runs tasks that score, and runs them on other workers after an infrastructure error."""

    def __init__(self, client: Client, pool: WorkerPool) -> None:
        self._client = client
        self._pool = pool

    async def run(
        self, function: Callable[..., Awaitable[Any]], *arguments: Any, what: str = ""
    ) -> Any:
        """Run a task on a reward worker; the last try keeps rows without a verdict, unscored.

        The driver does not know which worker ran the first try. Each retry prefers another worker,
        so that at least one of two is new.
        """
        reward_workers = self._pool.registry.present("reward")
        task, options = (self._client, self._pool.executions), dict[str, Any](what=what)
        for worker in reward_workers[:MAX_RESCORINGS]:
            try:
                return await run_reward_task(
                    *task, function, *arguments, is_last_try=False, **options
                )
            except InfrastructureError as error:
                logger.warning("scored again, since there was no verdict: %s", error)
            options |= {"workers": [worker.address], "allow_other_workers": True}
        return await run_reward_task(*task, function, *arguments, is_last_try=True, **options)

    async def row_by_row(self, rows: Future) -> list[Score]:
        """Score each row by a task of its own, so that only a row that kills workers fails.

        One after the other: a worker that dies loses all of its tasks.
        """
        killed, scores = reward_tasks.SCORING_KILLS, list[Score]()
        num_rows = await run_task(
            self._client, reward_tasks.num_rows, rows, resource="generator", num_slots=0
        )
        for row in range(num_rows):
            if scores == [killed] * reward_tasks.MAX_KILLING_ROWS:
                return [killed] * num_rows
            try:
                scores.append(await self.run(reward_tasks.score_row, rows, row))
            except KillsWorkers:
                logger.warning("reward workers died over row %d of a task", row)
                scores.append(killed)
        return scores


class Submissions:
    """Submits all rollouts of one turn of the event loop as one graph.

    A graph of sixteen rollouts costs the driver two thirds of sixteen graphs.
    """

    def __init__(self, client: Client, weights: WeightsReader) -> None:
        self._client = client
        self._weights = weights
        self._asked: dict[str, tuple[Episode, ...]] = {}
        self._sending: asyncio.Task[dict[str, Future]]

    async def submit(self, episodes: tuple[Episode, ...], *, key: str) -> Future:
        if not self._asked:
            self._sending = asyncio.create_task(self._send())
        self._asked[key] = episodes
        return (await asyncio.shield(self._sending)).pop(key)

    async def _send(self) -> dict[str, Future]:
        await asyncio.sleep(0)  # while the others of this turn ask
        pending, self._asked = self._asked, {}
        rollouts = self._client.map(
            generator_tasks.rollout,
            list(pending.values()),
            [self._weights.newest()] * len(pending),
            key=list(pending),
            resources={"generator": 1},
        )
        return dict(zip(pending, rollouts, strict=True))


class ScoringBatcher:
    """Scores and writes generated groups, one task for several groups that are ready.

    A group waits `BATCHING_WINDOW_S` for others while some are being generated. Each reward worker
    has at most one task. A task takes as many groups as the last one would have scored within
    `TARGET_TASK_S` or scores at the same time: many with quick verdicts, one with slow ones.
    """

    def __init__(self, client: Client, pool: WorkerPool) -> None:
        self._scoring = Scoring(client, pool)
        self._pool = pool
        self._waiting: list[_Group] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_start: asyncio.TimerHandle | None = None
        self._num_rolling_out = 0
        self._num_together = 1.0
        self._max_concurrency = 1

    @contextmanager
    def counting_rollout(self) -> Iterator[None]:
        self._num_rolling_out += 1
        try:
            yield
        finally:
            self._num_rolling_out -= 1

    async def receipt(self, rows: Future) -> GroupReceipt:
        loop = asyncio.get_running_loop()
        receipt: asyncio.Future[GroupReceipt] = loop.create_future()
        self._waiting.append(_Group(rows, receipt, loop.time()))
        self._start_soon()
        return await receipt

    def _start_soon(self) -> None:
        if self._next_start:
            self._next_start.cancel()
        if self._waiting:
            waits_until = (
                self._waiting[0].ready_at + BATCHING_WINDOW_S if self._num_rolling_out else 0.0
            )
            self._next_start = asyncio.get_running_loop().call_at(waits_until, self._start)

    def _start(self) -> None:
        """Start a task for each free worker, with its share of the groups that are ready."""
        self._waiting = [group for group in self._waiting if not group.receipt.done()]
        num_workers = max(1, len(self._pool.registry.present("reward")))
        while self._waiting and (free := num_workers - len(self._tasks)) > 0:
            share = -(-len(self._waiting) // free)
            num_taken = min(share, max(self._max_concurrency, int(self._num_together)))
            batch, self._waiting = self._waiting[:num_taken], self._waiting[num_taken:]
            task = asyncio.create_task(self._score_and_write(batch))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, batch))

    def _ended(self, batch: Sequence[_Group], task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            for group in batch:
                group.end(error)
        self._start_soon()

    async def _score_and_write(
        self, batch: Sequence[_Group], known: Sequence[Score] | None = None
    ) -> None:
        """Give each group its receipt or error; a group that fails a task fails alone.

        Args:
            known: the scores of the only group, where they are known.
        """
        score_and_write = partial(reward_tasks.score_and_write, known=known)
        try:
            receipts, seconds, self._max_concurrency = await self._scoring.run(
                score_and_write, [group.rows for group in batch]
            )
        except ArealFlowError as error:
            await self._score_again(batch, error, known)
            return
        self._num_together = len(batch) * TARGET_TASK_S / max(1e-3, seconds)
        began = asyncio.get_running_loop().time() - seconds
        for group, receipt in zip(batch, receipts, strict=True):
            if isinstance(receipt, GroupReceipt):
                queue_s = max(0.0, began - group.ready_at)
                receipt = replace(receipt, reward_queue_s=queue_s)
            group.end(receipt)

    async def _score_again(
        self, batch: Sequence[_Group], error: ArealFlowError, known: Sequence[Score] | None
    ) -> None:
        if all(group.receipt.done() for group in batch):
            return
        if len(batch) > 1:
            for group in batch:
                await self._score_and_write([group])
        elif known is None and isinstance(error, KillsWorkers):
            try:
                scores = await self._scoring.row_by_row(batch[0].rows)
            except ArealFlowError as worse:
                batch[0].end(worse)
            else:
                await self._score_and_write(batch, scores)
        else:
            batch[0].end(error)


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """A generated group that waits for its receipt."""

    rows: Future
    receipt: asyncio.Future[GroupReceipt]
    ready_at: float

    def end(self, outcome: GroupReceipt | BaseException) -> None:
        """Give the group its receipt or error, unless its episode was cancelled."""
        if self.receipt.done():
            return
        if isinstance(outcome, BaseException):
            self.receipt.set_exception(outcome)
        else:
            self.receipt.set_result(outcome)
