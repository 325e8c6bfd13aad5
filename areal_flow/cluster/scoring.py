"""Scores and writes generated groups, as Dask tasks of reward workers.

| who                    | waits for                | unblocked by                           |
|------------------------|--------------------------|----------------------------------------|
| a generated group      | others, to share a task  | them; `BATCHING_WINDOW_S`              |
| an episode             | a score, a tool's result | a task on a reward worker              |
| a reward worker's task | its resource             | the task before it, which never waits  |
|                        |                          | for an episode: nothing can deadlock   |

A task that fails is run again as long as the `RetryBudget` of each of its groups allows it. A task
that kills two reward workers is divided into its groups, and these into their rows, so that only
the row that is the cause has no score.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
from dask.utils import funcname, key_split
from distributed import Client, Future, KilledWorker, get_client
from distributed.client import FutureCancelledError

from areal_flow.cluster import reward_tasks
from areal_flow.cluster.registry import Executions
from areal_flow.cluster.worker import worker_context
from areal_flow.core.errors import (
    ArealFlowError,
    EngineError,
    InfrastructureError,
    RewardError,
    WorkersLost,
)
from areal_flow.core.types import GroupReceipt, Score
from areal_flow.flow.flow_setup import RetryBudget

if TYPE_CHECKING:
    from areal_flow.cluster.pool import WorkerPool

logger = logging.getLogger(__name__)

TARGET_TASK_S = 0.25
"""How long a task may score groups: they are written, and committed, when it ends."""

BATCHING_WINDOW_S = 0.15
"""How long a group waits for others, to be scored and written with them."""

MID_EPISODE_PRIORITY = 10
"""Higher than that of tasks that follow a rollout."""


class TaskLost(WorkersLost):
    """The workers that had this task, and not one that it depends on, have died."""


class KillsWorkers(RewardError):
    """Two reward workers ended while they executed the task, which is a likely cause."""


@contextmanager
def task_errors(key: str) -> Iterator[None]:
    """Raise one of our errors where a task with this key fails."""
    try:
        yield
    except ArealFlowError:
        raise
    except KilledWorker as error:
        kind = TaskLost if error.task == key else WorkersLost
        raise kind(f"each worker that ran {key_split(error.task)} died") from error
    except FutureCancelledError:
        raise EngineError("the task was cancelled on the cluster") from None
    except Exception as error:
        raise ArealFlowError(f"{type(error).__name__}: {error}") from error


async def run_task(
    client: Client,
    function: Callable[..., Any],
    *arguments: Any,
    resource: str,
    num_slots: int = 1,
    key: str = "",
    **options: Any,
) -> Any:
    """Run a function on a worker that has a resource; return its result.

    Args:
        num_slots: how many of the resource it takes; with 0 it runs beside tasks that take it.
        key: by default one that Dask's pages show as ROLE/FUNCTION.
        options: of `Client.submit`.
    """
    key = key or _new_key(resource.partition("-")[0], funcname(function))  # a rank's is trainer-0
    options |= {"key": key, "resources": {resource: num_slots}}
    task = client.submit(function, *arguments, **options)
    with task_errors(key):
        return await task


async def run_reward_task(
    client: Client,
    executions: Executions,
    function: Callable[..., Any],
    *arguments: Any,
    budgets: Sequence[RetryBudget],
    what: str = "",
    **options: Any,
) -> Any:
    """Run a function on a reward worker; again, while workers end because of other tasks.

    Args:
        budgets: of the groups that the task is for; what is not its fault is collateral.
        what: Dask's pages call the task reward/WHAT; by default the function's name.
    """
    key, num_runs = _new_key("reward", what or funcname(function)), 0
    while True:
        options |= {"key": f"{key}-{num_runs}", "resource": "reward"}
        num_runs += 1
        try:
            return await run_task(client, function, *arguments, **options)
        except TaskLost as error:
            if executions.num_ends(key) >= 2:
                raise KillsWorkers(str(error)) from error
            may_retry = [budget.spend(error) for budget in budgets]
            if not all(may_retry):
                raise


def _new_key(role: str, what: str) -> str:
    return f"{role}/{what}-{uuid4().hex}"


async def on_reward_worker(
    function: Callable[..., Any], what: Any, items: Sequence[Any]
) -> Sequence[Any]:
    """Run a task of several items for an episode; an item that kills workers fails alone.

    It runs on a generator, which does not have the group's budget: each call has its own.
    """
    context = worker_context()
    budget = RetryBudget(context.recipe.controller.max_attempts)
    try:
        results: Sequence[Any] = await run_reward_task(
            get_client(),
            context.executions,
            function,
            what,
            items,
            budgets=[budget],
            priority=MID_EPISODE_PRIORITY,
        )
        return results
    except KillsWorkers:
        if len(items) == 1:
            return [reward_tasks.RESULT_ON_CRASH[function]]
        alone = [await on_reward_worker(function, what, [item]) for item in items]
        return [*chain.from_iterable(alone)]
    except EngineError as error:
        raise RewardError(str(error)) from error


class Scoring:
    """Runs tasks that score, and runs them on other workers after an infrastructure error."""

    def __init__(self, client: Client, pool: WorkerPool) -> None:
        self._client = client
        self._pool = pool

    async def run(
        self,
        function: Callable[..., Awaitable[Any]],
        *arguments: Any,
        budgets: Sequence[RetryBudget],
        what: str = "",
    ) -> Any:
        """Run a task on a reward worker; the last try keeps rows without a verdict, unscored.

        The driver does not know which worker ran the first try. Each retry prefers another worker,
        so that at least one of two is new.
        """
        unused_workers = iter(self._pool.registry.present("reward"))
        options = dict[str, Any](what=what, budgets=budgets)
        while True:
            worker = next(unused_workers, None)
            num_last = sum(budget.is_last_attempt for budget in budgets)
            is_last_try = worker is None or num_last == len(budgets)
            try:
                return await run_reward_task(
                    self._client,
                    self._pool.executions,
                    function,
                    *arguments,
                    is_last_try=is_last_try,
                    **options,
                )
            except InfrastructureError as error:
                if worker is None or num_last:  # with others, a group at its last attempt goes on
                    raise
                for budget in budgets:
                    budget.spend(error)
                logger.warning("scored again, since there was no verdict: %s", error)
            options |= {"workers": [worker.address], "allow_other_workers": True}

    async def table(self, rows: Future, budget: RetryBudget, *, what: str) -> pa.Table:
        """Return some groups' rows with their scores, unwritten."""
        options: dict[str, Any] = {"budgets": [budget], "what": what}
        try:
            return await self.run(reward_tasks.score, rows, **options)
        except KillsWorkers as error:
            budget.spend(error)
            score = partial(reward_tasks.score, known_scores=await self.row_by_row(rows, budget))
            return await self.run(score, rows, **options)

    async def row_by_row(self, rows: Future, budget: RetryBudget) -> list[Score]:
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
                scores.append(await self.run(reward_tasks.score_row, rows, row, budgets=[budget]))
            except KillsWorkers:
                logger.warning("reward workers died over row %d of a task", row)
                scores.append(killed)
        return scores


class ScoringBatcher:
    """Scores and writes generated groups, one task for several groups that are ready.

    A group waits `BATCHING_WINDOW_S` for others while some are being generated. Each reward worker
    has at most one task. A task takes as many groups as the last one would have scored within
    `TARGET_TASK_S` or scores at the same time: many with quick verdicts, one with slow ones.
    """

    def __init__(self, scoring: Scoring, pool: WorkerPool) -> None:
        self._scoring = scoring
        self._pool = pool
        self._waiting: list[_Group] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_start: asyncio.TimerHandle | None = None
        self._num_rolling_out = 0
        self._batch_size = 1.0
        self._max_concurrency = 1

    @contextmanager
    def counting_rollout(self) -> Iterator[None]:
        self._num_rolling_out += 1
        try:
            yield
        finally:
            self._num_rolling_out -= 1

    async def receipt(self, rows: Future, budget: RetryBudget) -> GroupReceipt:
        loop = asyncio.get_running_loop()
        receipt: asyncio.Future[GroupReceipt] = loop.create_future()
        self._waiting.append(_Group(rows, budget, receipt, loop.time()))
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
            num_taken = min(share, max(self._max_concurrency, int(self._batch_size)))
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
        self, batch: Sequence[_Group], known_scores: Sequence[Score] | None = None
    ) -> None:
        """Give each group its receipt or error; a group that fails a task fails alone.

        Args:
            known_scores: the scores of the only group, if a task has scored them already.
        """
        try:
            receipts, seconds, self._max_concurrency = await self._scoring.run(
                partial(reward_tasks.score_and_write, known_scores=known_scores),
                [group.rows for group in batch],
                budgets=[group.budget for group in batch],
            )
        except ArealFlowError as error:
            await self._score_divided(batch, error, known_scores)
            return
        self._batch_size = len(batch) * TARGET_TASK_S / max(1e-3, seconds)
        began = asyncio.get_running_loop().time() - seconds
        for group, receipt in zip(batch, receipts, strict=True):
            if isinstance(receipt, GroupReceipt):
                queue_s = max(0.0, began - group.ready_at)
                receipt = replace(receipt, reward_queue_s=queue_s)
            group.end(receipt)

    async def _score_divided(
        self, batch: Sequence[_Group], error: ArealFlowError, known_scores: Sequence[Score] | None
    ) -> None:
        """Score the groups of a task that failed one by one, or the rows of one that kills."""
        if all(group.receipt.done() for group in batch):
            return
        first = batch[0]
        if len(batch) > 1:
            for group in batch:
                if group.budget.spend(error, is_collateral=True):  # another one may be the cause
                    await self._score_and_write([group])
                else:
                    group.end(error)
        elif known_scores is None and isinstance(error, KillsWorkers):
            first.budget.spend(error)
            try:
                scores = await self._scoring.row_by_row(first.rows, first.budget)
            except ArealFlowError as row_error:
                first.end(row_error)
            else:
                await self._score_and_write(batch, scores)
        else:
            first.end(error)


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """A generated group that waits for its receipt."""

    rows: Future
    budget: RetryBudget
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
