"""Sends each request to all ranks of the trainer; an answer counts when all give the same.

A rank that fails ends its replica group. The other ranks see the connections close; those that
do not are replaced, like it. Then all are restored together, as a new replica group.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, TypeVar
from uuid import uuid4

from distributed import Client

from areal_flow.cluster import trainer_tasks
from areal_flow.cluster.placement import trainer_name
from areal_flow.cluster.results import run_task
from areal_flow.errors import EngineError, TrainerLost, TrainingError
from areal_flow.types import PolicyHashes, Rendezvous, StepRequest, StepResult

logger = logging.getLogger(__name__)

NOTICE_S = 10.0
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
        self._num_ranks = num_ranks
        self._replace = replace
        self._writing_ranks = range(1)

    async def restore(self, checkpoint: int) -> PolicyHashes:
        name, num_ranks = uuid4().hex, self._num_ranks
        arguments = [(checkpoint, Rendezvous(name, rank, num_ranks)) for rank in range(num_ranks)]
        found = await self._on_all_ranks(trainer_tasks.restore_trainer, arguments)
        _require_equal(found, of=f"checkpoint {checkpoint}")
        return found[0]  # type: ignore[no-any-return]

    async def step(self, request: StepRequest) -> StepResult:
        """Compute one step on all ranks; never again by itself, since a step must not repeat."""
        arguments = [(request,)] * self._num_ranks
        found = await self._on_all_ranks(trainer_tasks.train_step, arguments)
        _require_equal([result.hashes for result in found], of=f"step {request.step}")
        return found[0]  # type: ignore[no-any-return]

    async def require_policy(self) -> None:
        """Return if every rank holds a policy, once all that are being started are there."""
        await self._on_all_ranks(trainer_tasks.require_policy, [()] * self._num_ranks)

    async def take_snapshot(self, weights_hash: str, next_submission_index: int) -> None:
        """Have the leader copy the whole checkpoint, or every rank its part."""
        arguments = (weights_hash, next_submission_index)
        has_part = await self.lead(trainer_tasks.take_snapshot, *arguments)
        self._writing_ranks = range(self._num_ranks if has_part else 1)
        others = self._writing_ranks[1:]
        await asyncio.gather(
            *(
                self._ask(rank, trainer_tasks.take_snapshot, arguments, num_slots=1)
                for rank in others
            )
        )

    async def write_snapshot(self, step: int) -> None:
        """Have the ranks write what they copied, beside their steps."""
        await asyncio.gather(
            *(
                self._ask(rank, trainer_tasks.write_snapshot, (step,), num_slots=0)
                for rank in self._writing_ranks
            )
        )
        await self.lead(trainer_tasks.complete_snapshot, step, num_slots=0)

    async def read_ahead(self, trajectory_ids: Sequence[str]) -> None:
        """Have every rank read rows beside its step; one that cannot reads them when it must."""
        arguments = (tuple(trajectory_ids),)
        asked = (
            self._ask(rank, trainer_tasks.read_ahead, arguments, num_slots=0)
            for rank in range(self._num_ranks)
        )
        await asyncio.gather(*asked, return_exceptions=True)

    async def lead(self, function: Callable[..., Any], *arguments: Any, num_slots: int = 1) -> Any:
        """Run a function on the leader: what one process does for all.

        Args:
            num_slots: 0 for a function that runs beside the leader's steps.
        """
        return await self._ask(0, function, arguments, num_slots=num_slots)

    async def _ask(
        self, rank: int, function: Callable[..., Any], arguments: tuple[Any, ...], *, num_slots: int
    ) -> Any:
        name = trainer_name(rank)
        try:
            return await run_task(
                self._client, function, *arguments, resource=name, num_slots=num_slots, retries=0
            )
        except EngineError as error:
            raise TrainerLost(f"the trainer died: {error}") from error

    async def _on_all_ranks(
        self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        """Return what the ranks answer, rank 0 first; raise the failure that caused the others."""
        answers = [
            asyncio.ensure_future(self._ask(rank, function, given, num_slots=1))
            for rank, given in enumerate(arguments)
        ]
        try:
            _, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
            if waiting:
                _, waiting = await asyncio.wait(waiting, timeout=NOTICE_S)
            for rank, answer in enumerate(answers):
                if answer in waiting:
                    await self._replace(trainer_name(rank), why="its replica group has ended")
            found = await asyncio.gather(*answers, return_exceptions=True)
        finally:
            for answer in answers:
                answer.cancel()
        failures = [answer for answer in found if isinstance(answer, BaseException)]
        for failure in sorted(failures, key=lambda failure: isinstance(failure, TrainerLost)):
            raise failure
        return found


def _require_equal(found: Sequence[PolicyHashes], *, of: str) -> None:
    if any(hashes != found[0] for hashes in found):
        raise TrainerLost(f"{of}: the trainer's ranks hold different weights: {found}")


class DaskTrainer:
    """Sends steps and checkpoints to the trainer; restores it as soon as it is lost.

    Not only when it is asked for something: generators may wait for weights that it holds, and a
    step for what these generators will make.
    """

    def __init__(
        self,
        replicas: TrainerReplicas,
        restore: Callable[[], Awaitable[str]],
        *,
        lost: asyncio.Event,
    ) -> None:
        """Take what restores the ranks.

        Args:
            restore: brings them to the ledger's head; returns the hash of their weights.
            lost: set whenever a rank's process ends.
        """
        self._replicas = replicas
        self._restore = restore
        self._lost = lost
        self.lock = asyncio.Lock()
        """See `FlowBackends.trainer_lock`; who asks for a step holds it."""

    async def keep_restored(self) -> NoReturn:
        """Restore the trainer whenever it is lost, between two steps; never ends."""
        while True:
            await self._lost.wait()
            self._lost.clear()
            async with self.lock:
                await self._persist(self._replicas.require_policy)

    async def restore(self) -> str:
        return await self._persist(self._restore)

    async def step(self, request: StepRequest) -> StepResult:
        return await self._persist(lambda: self._replicas.step(request))

    async def read_ahead(self, trajectory_ids: Sequence[str]) -> None:
        await self._replicas.read_ahead(trajectory_ids)

    async def take_snapshot(self, *, weights_hash: str, next_submission_index: int) -> None:
        """Copy the state with these weights, between two steps, for `write_snapshot`."""
        state = (weights_hash, next_submission_index)
        async with self.lock:
            await self._persist(lambda: self._replicas.take_snapshot(*state))

    async def write_snapshot(self, step: int) -> None:
        """Write the snapshot of a step as a checkpoint, beside the steps that follow."""
        await self._replicas.write_snapshot(step)

    async def _persist(self, ask: Callable[[], Awaitable[Result]]) -> Result:
        """Ask the trainer, restored first where that is needed: it may be lost again meanwhile."""
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
