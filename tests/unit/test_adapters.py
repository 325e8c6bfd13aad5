"""A lost trainer is restored a bounded number of times; a silent generator is not waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from areal_flow.cluster.adapters import (
    ACKNOWLEDGE_TIMEOUT_S,
    DaskTrainer,
    DaskWeights,
    SharedWrites,
)
from areal_flow.cluster.registry import SILENT_S
from areal_flow.cluster.trainer_replicas import TrainerReplicas
from areal_flow.errors import SchemaError, StorageError, TrainerLost, TrainingError
from areal_flow.testing import MemoryWriter
from tests.unit.virtual_time import run_in_virtual_time


class FakeClient:
    """A Dask client whose tasks answer, or are lost, as told; loads take as long as told."""

    def __init__(self, answers: Sequence[Any] = (), load_s: dict[str, float] | None = None) -> None:
        self._answers = iter(answers)
        self._load_s = load_s or {}

    def submit(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self._answer()

    async def _answer(self) -> Any:
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run(
        self, function: Callable[..., Any], version: int, *, workers: list[str], on_error: str
    ) -> dict[str, Any]:
        (address,) = workers
        await asyncio.sleep(self._load_s[address])
        return {address: None}


class FakeGenerator:
    """The record of a generator, which is silent some time after it was stopped."""

    def __init__(self, address: str, stopped_at: float | None) -> None:
        self.address = address
        self._stopped_at = stopped_at

    @property
    def is_silent(self) -> bool:
        stopped_at = self._stopped_at
        now = asyncio.get_running_loop().time()
        return stopped_at is not None and now - stopped_at > SILENT_S


class FakeGenerators:
    """Two generators, one of which falls silent when it is stopped."""

    def __init__(self, stopped_at: float | None = None) -> None:
        self.stopped_at = stopped_at
        self.replaced: list[str] = []

    @property
    def registry(self) -> FakeGenerators:
        return self

    def present(self, role: str) -> list[FakeGenerator]:
        return [FakeGenerator("healthy", None), FakeGenerator("other", self.stopped_at)]

    async def replace(self, address: str, *, why: str) -> None:
        self.replaced.append(address)


def trainer_of(client: FakeClient, restore: Callable[[], Any]) -> DaskTrainer:
    replicas = TrainerReplicas(client, num_ranks=1, replace=FakeGenerators().replace)
    return DaskTrainer(replicas, restore)


def restored_over(losses: int) -> int:
    num_restored = 0

    async def restore() -> None:
        nonlocal num_restored
        num_restored += 1

    lost = [TrainerLost("the trainer died") for _ in range(losses)]
    trainer = trainer_of(FakeClient([*lost, "done"]), restore)
    asyncio.run(trainer.take_snapshot(weights_hash="w", next_submission_index=0))
    return num_restored


@pytest.mark.parametrize("losses", [0, 1, 2, 3])
def test_lost_trainer_is_restored_and_asked_again(losses: int) -> None:
    assert restored_over(losses) == losses


def test_trainer_that_is_lost_too_often_ends_with_the_cause() -> None:
    with pytest.raises(TrainingError, match=r"restored 3 times and lost again: the trainer died"):
        restored_over(4)


def test_trainer_that_dies_during_its_restoration_is_restored_again() -> None:
    num_restored = 0

    async def restore() -> None:
        nonlocal num_restored
        num_restored += 1
        if num_restored == 1:
            raise TrainerLost("the trainer died: in the middle of it")

    trainer = trainer_of(FakeClient([TrainerLost("it died"), "done"]), restore)
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

    assert asyncio.run(trainer_of(FakeClient(), restore).restore()) == "weights"
    assert tries == 3


def seconds_to_announce(live: FakeGenerators, **load_s: float) -> float:
    async def announce() -> float:
        weights = DaskWeights(FakeClient(load_s=load_s), MemoryWriter(), live)
        await weights.load_everywhere(1)
        return asyncio.get_running_loop().time()

    seconds: float = run_in_virtual_time(announce())
    return seconds


def test_weights_are_announced_when_every_generator_has_loaded() -> None:
    live = FakeGenerators()
    assert seconds_to_announce(live, healthy=0.2, other=2.0) == pytest.approx(2.0)
    assert live.replaced == []


def test_stopped_generator_is_waited_for_three_seconds_and_left_to_the_watch() -> None:
    live = FakeGenerators(stopped_at=0.0)
    assert seconds_to_announce(live, healthy=0.2, other=1e9) == pytest.approx(3.5, abs=0.5)
    assert live.replaced == []


def test_generator_that_speaks_and_does_not_load_is_replaced() -> None:
    live = FakeGenerators()
    waited = seconds_to_announce(live, healthy=0.2, other=1e9)
    assert waited == pytest.approx(ACKNOWLEDGE_TIMEOUT_S, abs=0.5)
    assert live.replaced == ["other"]


def written(*answers: Any) -> list[Any]:
    """Return what two groups hear that are ready at once, and one that is ready later."""

    async def write() -> list[Any]:
        writes = SharedWrites(FakeClient(answers))
        both = await asyncio.gather(writes.write(0), writes.write(1), return_exceptions=True)
        return [*both, await writes.write(2)]

    return asyncio.run(write())


def test_groups_written_together_each_hear_of_their_own() -> None:
    broken = SchemaError("a row is wrong")
    assert written(["receipt 0", broken], ["receipt 2"]) == ["receipt 0", broken, "receipt 2"]


def test_batch_that_is_not_written_fails_its_groups_and_no_later_one() -> None:
    full = StorageError("the disk is full")
    assert written(full, ["receipt 2"]) == [full, full, "receipt 2"]
