"""A lost trainer is restored at once, but not between a step and its publication."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal_flow.cluster import trainer_tasks
from areal_flow.cluster.trainer_replicas import DaskTrainer, TrainerReplicas
from areal_flow.core.errors import ArealFlowError, TrainerLost, TrainingError
from areal_flow.core.types import Episode, GroupReceipt, StepRequest, StepResult
from areal_flow.flow.flow import Flow
from areal_flow.flow.flow_setup import FlowBackends, InitialState, RetryBudget
from areal_flow.flow.schedules import (
    run_async_schedule,
    run_barrier_schedule,
    run_until_first_ends,
)
from areal_flow.log.ledger_row import Provenance
from areal_flow.planning.virtual_time import run_in_virtual_time
from tests.flow_fakes import FakeCluster, MemoryLog, flow_recipe, prompt_at

NUM_STEPS = 3
RESTORE_S = 30.0


class Ranks(FakeCluster):
    """Trainer ranks that can be lost, and generators that get weights only from them."""

    def __init__(self) -> None:
        super().__init__(random.Random(0))
        self.holding, self.lost = asyncio.Event(), asyncio.Event()
        self.holding.set()
        self.happened: list[str] = []
        self.num_losses_ahead = 0

    def lose(self) -> None:
        self.holding.clear()
        self.lost.set()

    async def roll_out(self, episode: Episode, budget: RetryBudget) -> GroupReceipt:
        await self.holding.wait()
        return await super().roll_out(episode, budget)

    async def require_policy(self) -> None:
        if not self.holding.is_set():
            raise TrainerLost("it was killed")

    async def step(self, request: StepRequest) -> StepResult:
        await self.require_policy()
        self.happened.append(f"step {request.step}")
        return await super().step(request)

    async def read_ahead(self, trajectory_ids: Sequence[str]) -> None: ...

    async def write_snapshot(self, step: int) -> None: ...

    async def publish(self, version: int) -> None:
        self.happened.append(f"publish {version}")

    async def restore(self) -> str:
        self.happened.append("restore")
        await asyncio.sleep(RESTORE_S)
        if self.num_losses_ahead:
            self.num_losses_ahead -= 1
            raise TrainerLost("it was killed again")
        self.holding.set()
        return "weights"


class UnrepeatableRanks(Ranks):
    """Ranks whose replay makes other weights each time."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.num_restored = "", 0
        self.snapshots: list[str] = []

    def _require_held(self, weights_hash: str) -> None:
        if weights_hash != self.held:
            raise TrainerLost(f"it holds {self.held}, not {weights_hash}")

    async def step(self, request: StepRequest) -> StepResult:
        await self.require_policy()
        self._require_held(request.parent_hash)
        result = await super().step(request)
        self.held = result.hashes.weights_hash
        return result

    async def take_snapshot(self, *, weights_hash: str, next_submission_index: int) -> None:
        await self.require_policy()
        self._require_held(weights_hash)
        self.snapshots.append(weights_hash)

    async def restore(self) -> str:
        await super().restore()
        self.num_restored += 1
        self.held = f"fork {self.num_restored}"
        return self.held


class LosingLog(MemoryLog):
    """A log in which the trainer is lost while the first step's row is on its way."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    async def append(self, row: dict[str, Any]) -> None:
        if row["step"] == 1:
            self._ranks.lose()
            await asyncio.sleep(2 * RESTORE_S)
        await super().append(row)


def train(ranks: Ranks, log: MemoryLog, schedule: Any = run_async_schedule) -> None:
    """Train as a driver does."""
    trainer = DaskTrainer(ranks, ranks.restore, lost=ranks.lost)  # type: ignore[arg-type]
    flow = Flow(
        flow_recipe(num_steps=NUM_STEPS, batch_size=4, group_size=2, max_staleness=1),
        FlowBackends(ranks, log, trainer, ranks, prompt_at, log.on_step),
        InitialState(),
        Provenance(1, "", ""),
        max_running=16,
    )

    async def to_the_end() -> None:
        try:
            await run_until_first_ends(schedule(flow), trainer.keep_restored())
        finally:
            await flow.close()

    run_in_virtual_time(to_the_end())
    assert flow.imbalance() == 0


@pytest.mark.parametrize("schedule", [run_async_schedule, run_barrier_schedule])
def test_lost_trainer_is_restored_although_no_batch_is_ready(schedule: Any) -> None:
    """None would become ready: the generators wait for weights."""
    ranks, log = Ranks(), MemoryLog()
    ranks.lose()
    train(ranks, log, schedule)
    assert ranks.happened[0] == "restore"
    assert ranks.happened.count("restore") == 1
    assert [row["step"] for row in log.rows] == [1, 2, 3]


def test_trainer_that_is_lost_after_a_step_is_restored_once_that_is_published() -> None:
    ranks = Ranks()
    train(ranks, LosingLog(ranks))
    assert ranks.happened[:4] == ["step 1", "publish 1", "restore", "step 2"]


def test_training_continues_from_the_fork_where_replay_does_not_repeat_bits() -> None:
    ranks = UnrepeatableRanks()
    log = LosingLog(ranks)
    train(ranks, log)
    first, second, third = log.rows
    assert second["parent_hash"] == "fork 1" != first["weights_hash"]
    assert third["parent_hash"] == second["weights_hash"]
    assert ranks.num_restored == 1


def test_snapshot_after_a_fork_is_of_what_the_ranks_hold() -> None:
    ranks = UnrepeatableRanks()
    trainer = DaskTrainer(ranks, ranks.restore, lost=ranks.lost)  # type: ignore[arg-type]

    async def snapshot() -> None:
        ranks.held = "the ledger's"
        await trainer.take_snapshot(weights_hash="the ledger's", next_submission_index=0)
        ranks.lose()
        await trainer.take_snapshot(weights_hash="the ledger's", next_submission_index=0)

    run_in_virtual_time(snapshot())
    assert ranks.snapshots == ["the ledger's", "fork 1"]


def test_trainer_that_cannot_be_restored_ends_the_run_with_the_cause() -> None:
    ranks = Ranks()
    ranks.num_losses_ahead = 99
    ranks.lose()
    with pytest.raises(
        TrainingError, match=r"restored 3 times and lost again: it was killed again"
    ):
        train(ranks, MemoryLog())


@pytest.mark.parametrize("num_turns", range(6))
def test_failure_is_raised_even_if_a_signal_cancels_the_cleanup(num_turns: int) -> None:
    """The signal comes this many turns of the event loop after the other stage ended."""

    async def fail() -> None:
        raise TrainingError("the last one is lost")

    async def end_slowly() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            send_signal(num_turns)
            await asyncio.sleep(0 if num_turns else 1)

    def send_signal(turns_left: int) -> None:
        if turns_left:
            asyncio.get_running_loop().call_soon(send_signal, turns_left - 1)
        else:
            driver[0].cancel("SIGTERM")

    async def drive() -> None:
        with pytest.raises(TrainingError, match="the last one is lost"):
            await run_until_first_ends(end_slowly(), fail())

    async def main() -> None:
        driver.append(asyncio.ensure_future(drive()))
        await driver[0]

    driver: list[asyncio.Future[None]] = []
    run_in_virtual_time(main())


class Answers:
    """A Dask client whose tasks answer, or are lost, in this order."""

    def __init__(self, *answers: Any) -> None:
        self._answers = iter(answers)

    async def submit(self, *_: Any, **__: Any) -> Any:
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def trainer_of(client: Answers, restore: Callable[[], Any]) -> DaskTrainer:
    async def replace(*_: Any, **__: Any) -> None: ...

    replicas = TrainerReplicas(client, num_ranks=1, replace=replace)  # type: ignore[arg-type]
    return DaskTrainer(replicas, restore, lost=asyncio.Event())


def restored_over(losses: int) -> int:
    num_restored = 0

    async def restore() -> str:
        nonlocal num_restored
        num_restored += 1
        return "weights"

    lost = [TrainerLost("the trainer died") for _ in range(losses)]
    trainer = trainer_of(Answers(*lost, "done"), restore)
    asyncio.run(trainer.take_snapshot(weights_hash="w", next_submission_index=0))
    return num_restored


@pytest.mark.parametrize("losses", [0, 1, 2, 3])
def test_lost_trainer_is_restored_and_the_step_is_retried(losses: int) -> None:
    assert restored_over(losses) == losses


def test_trainer_that_is_lost_too_often_ends_with_the_cause() -> None:
    with pytest.raises(TrainingError, match=r"restored 3 times and lost again: the trainer died"):
        restored_over(4)


def test_trainer_that_dies_during_its_restoration_is_restored_again() -> None:
    num_restored = 0

    async def restore() -> str:
        nonlocal num_restored
        num_restored += 1
        if num_restored == 1:
            raise TrainerLost("the trainer died: in the middle of it")
        return "weights"

    trainer = trainer_of(Answers(TrainerLost("it died"), "done"), restore)
    asyncio.run(trainer.take_snapshot(weights_hash="w", next_submission_index=0))
    assert num_restored == 2


def test_trainer_that_dies_while_a_run_is_resumed_is_restored_again() -> None:
    tries = 0

    async def restore() -> str:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise TrainerLost("it died")
        return "weights"

    asyncio.run(trainer_of(Answers(), restore).restore())
    assert tries == 3


DONE = SimpleNamespace(hashes="weights")


class Process:
    """A Dask client that runs tasks here, on a rank whose first steps raise these errors."""

    config = SimpleNamespace(takes_turns=False)

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.replaced: list[str] = []

    async def submit(self, task: Any, *arguments: Any, **_: Any) -> Any:
        return task(*arguments)

    def step(self, request: Any) -> Any:
        if self._errors:
            raise self._errors.pop(0)
        return DONE

    async def replace(self, worker: str, *, why: str) -> None:
        self.replaced.append(f"{worker}: {why}")


def stepped(process: Process, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Take a step; return how many processes were replaced before each restoration."""
    replaced = []

    async def restore() -> str:
        replaced.append(len(process.replaced))
        return "weights"

    monkeypatch.setattr(trainer_tasks, "_rank", lambda: process)
    replicas = TrainerReplicas(process, num_ranks=1, replace=process.replace)  # type: ignore[arg-type]
    trainer = DaskTrainer(replicas, restore, lost=asyncio.Event())
    request = StepRequest(1, "", 0, (), "", 1)
    assert asyncio.run(trainer.step(request)) is DONE
    return replaced


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
)
def test_trainer_whose_gpu_fails_is_restored_by_a_new_process(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one is unusable: CUDA refuses all further work."""
    process = Process(error, error)
    assert stepped(process, monkeypatch) == [1, 2]
    assert process.replaced[0] == f"trainer-0: the trainer's device failed: {error}"


def test_error_of_a_step_that_no_device_made_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(RuntimeError("cumsum has no deterministic implementation"))
    with pytest.raises(ArealFlowError, match="RuntimeError: cumsum has no deterministic"):
        stepped(process, monkeypatch)
    assert process.replaced == []
