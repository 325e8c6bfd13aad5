"""Sends each request to all ranks of the trainer; an answer counts when all give the same.

A rank that fails ends its replica group. The other ranks see the connections close; those that
do not are replaced, too. Then all ranks are restored together, as a new replica group.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from uuid import uuid4

from distributed import Client

from areal_flow.cluster import trainer_tasks
from areal_flow.cluster.placement import trainer_name
from areal_flow.cluster.scoring import run_task
from areal_flow.core.errors import DeviceError, EngineError, TrainerLost, TrainingError
from areal_flow.core.types import PolicyHashes, Rendezvous, StepRequest, StepResult

logger = logging.getLogger(__name__)

NOTICE_S = 3.0
"""How long ranks have to notice that another one failed."""
MAX_RESTORATIONS = 3
"""How often the trainer may be lost over one request."""

Result = TypeVar("Result")


class TrainerReplicas:
    """The trainer ranks of a run."""

    def __init__(
        self, client: Client, *, num_ranks: int, replace: Callable[..., Awaitable[None]]
    ) -> None:
        self._client = client
        self._ranks = range(num_ranks)
        self._replace = replace
        self._name = uuid4().hex
        """Of the replica group: a new one once a rank was lost."""

    async def fine_tune(self, source: Path) -> tuple[int, dict[str, float]]:
        """Fine-tune for a while; return how many steps were taken in all, and their metrics."""
        try:
            answers = await self._on_all_ranks(trainer_tasks.sft_chunk, self._connected(source))
        except TrainerLost:
            self._name = uuid4().hex
            raise
        return answers[0]  # type: ignore[no-any-return]

    async def save_fine_tuned(self) -> None:
        await self._on_all_ranks(trainer_tasks.sft_checkpoint, [()] * len(self._ranks))

    async def begin(self, source: Path) -> tuple[PolicyHashes, str]:
        """Stage version 0; return its hashes, and the numeric environment."""
        begin = trainer_tasks.begin_from_directory
        answers = await self._on_all_ranks(begin, self._connected(source))
        _require_equal([hashes for hashes, _ in answers], of="version 0")
        return answers[0]  # type: ignore[no-any-return]

    async def restore(self, checkpoint: int) -> PolicyHashes:
        self._name = uuid4().hex
        restore = trainer_tasks.restore_trainer
        hashes = await self._on_all_ranks(restore, self._connected(checkpoint))
        _require_equal(hashes, of=f"checkpoint {checkpoint}")
        return hashes[0]  # type: ignore[no-any-return]

    def _connected(self, argument: Any) -> list[tuple[Any, Rendezvous]]:
        """Return arguments for each rank: one, and where it connects to the others."""
        num_ranks = len(self._ranks)
        return [(argument, Rendezvous(self._name, rank, num_ranks)) for rank in self._ranks]

    async def step(self, request: StepRequest) -> StepResult:
        """Compute one step on all ranks, without retries: a step must not repeat."""
        results = await self._on_all_ranks(
            trainer_tasks.train_step, [(request,)] * len(self._ranks)
        )
        _require_equal([result.hashes for result in results], of=f"step {request.step}")
        return results[0]  # type: ignore[no-any-return]

    async def require_policy(self) -> None:
        """Return if every rank holds a policy, once ranks that start have started."""
        await self._on_all_ranks(trainer_tasks.require_policy, [()] * len(self._ranks))

    async def take_snapshot(self, *, weights_hash: str, next_submission_index: int) -> None:
        """Copy the checkpoint's state, every rank its part."""
        state = (trainer_tasks.take_snapshot, weights_hash, next_submission_index)
        await asyncio.gather(*self._ask_each(*state))

    async def write_snapshot(self, step: int) -> None:
        """Write the copies of all ranks while they train."""
        write = (trainer_tasks.write_snapshot, step)
        await asyncio.gather(*self._ask_each(*write, num_slots=0))
        await self._ask(0, trainer_tasks.complete_snapshot, step, num_slots=0)

    async def read_ahead(self, trajectory_ids: Sequence[str]) -> None:
        """Have every rank read rows while it trains; failures do not matter."""
        read = (trainer_tasks.read_ahead, tuple(trajectory_ids))
        requests = self._ask_each(*read, num_slots=0)
        await asyncio.gather(*requests, return_exceptions=True)

    def _ask_each(self, *call: Any, num_slots: int = 1) -> list[Any]:
        return [self._ask(rank, *call, num_slots=num_slots) for rank in self._ranks]

    async def _ask(
        self, rank: int, function: Callable[..., Any], *arguments: Any, num_slots: int = 1
    ) -> Any:
        """Run a function on a rank; with no slots, while it trains."""
        options: dict[str, Any] = {"resource": trainer_name(rank), "num_slots": num_slots}
        try:
            return await run_task(self._client, function, *arguments, **options, retries=0)
        except EngineError as error:
            raise TrainerLost(f"the trainer died: {error}") from error
        except DeviceError as error:
            await self._replace(trainer_name(rank), why=str(error))
            raise

    async def _on_all_ranks(
        self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """Return the ranks' answers, rank 0 first; raise the failure that caused the others."""
        answers = [
            asyncio.ensure_future(self._ask(rank, function, *given))
            for rank, given in enumerate(arguments)
        ]
        try:
            _, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
            if waiting:
                _, waiting = await asyncio.wait(waiting, timeout=NOTICE_S)
            for rank, answer in enumerate(answers):
                if answer in waiting:
                    await self._replace(trainer_name(rank), why="its replica group has ended")
            results = await asyncio.gather(*answers, return_exceptions=True)
        finally:
            for answer in answers:
                answer.cancel()
        failures = [answer for answer in results if isinstance(answer, BaseException)]
        for failure in sorted(failures, key=_rank_of_cause):
            raise failure
        return results


def _rank_of_cause(failure: BaseException) -> int:
    """Return 0 for what ends the run; ranks that only noticed the end of another come last."""
    return isinstance(failure, TrainerLost) + (type(failure) is TrainerLost)


def _require_equal(answers: Sequence[PolicyHashes], *, of: str) -> None:
    if any(hashes != answers[0] for hashes in answers):
        raise TrainerLost(f"{of}: the trainer's ranks hold different weights: {answers}")


class DaskTrainer:
    """The controller's `Trainer`: it restores the ranks as soon as they are lost.

    It does not wait for the next request: generators may wait for weights that the trainer holds,
    and the next step for completions of these generators.
    """

    def __init__(
        self,
        replicas: TrainerReplicas,
        restore: Callable[[], Awaitable[str]],
        *,
        lost: asyncio.Event,
        turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        """Take what restores the ranks.

        Args:
            restore: restores the ledger's head; returns the hash of the weights that the ranks
                hold then, which differs from the ledger's where a replay forks.
            lost: set whenever a rank's process ends.
            turn: what surrounds each computation, where generators leave a GPU for it.
        """
        self._replicas = replicas
        self._restore = restore
        self._lost = lost
        self._turn = turn
        self._restored_hash: str | None = None
        """What the ranks hold, if they were restored since the last step."""
        self.lock = asyncio.Lock()
        self.read_ahead = replicas.read_ahead
        self.write_snapshot = replicas.write_snapshot

    async def keep_restored(self) -> NoReturn:
        """Restore the trainer whenever it is lost, between two steps; never return."""
        while True:
            await self._lost.wait()
            self._lost.clear()
            async with self.lock:
                await self._persist(self._replicas.require_policy)

    async def restore(self) -> None:
        """Restore the ledger's head; the next step starts from what was restored."""
        await self._persist(self._restore_head)

    async def step(self, request: StepRequest) -> StepResult:
        async def in_turn() -> StepResult:
            parent_hash = self._restored_hash or request.parent_hash
            async with self._turn():
                return await self._replicas.step(replace(request, parent_hash=parent_hash))

        result = await self._persist(in_turn)
        self._restored_hash = None
        return result

    async def take_snapshot(self, *, weights_hash: str, next_submission_index: int) -> None:
        """Copy the state of the ledger's head, which has these weights unless a replay forked."""

        async def take() -> None:
            await self._replicas.take_snapshot(
                weights_hash=self._restored_hash or weights_hash,
                next_submission_index=next_submission_index,
            )

        async with self.lock:
            await self._persist(take)

    async def _restore_head(self) -> None:
        self._restored_hash = await self._restore()

    async def _persist(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        """Call; restore the trainer and call again while it is lost."""
        for num_restored in range(MAX_RESTORATIONS + 1):
            try:
                if num_restored and ask != self._restore_head:
                    async with self._turn():
                        await self._restore_head()
                return await ask()
            except TrainerLost as lost:
                logger.warning("%s; restoring it from checkpoint and ledger", lost)
                last = lost
        raise TrainingError(
            f"the trainer was restored {MAX_RESTORATIONS} times and lost again: {last}. See what "
            "ends its process, then resume"
        )
