"""Trainer ranks: batches add up, several processes equal one, and exits are noticed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from areal_flow.algorithms.registry import ALGORITHMS, ActorCriticPPO
from areal_flow.cluster.trainer_replicas import NOTICE_S, TrainerReplicas
from areal_flow.cluster.trainer_tasks import exchange_timeout_s
from areal_flow.core.errors import ArealFlowError, DeviceError, StorageError, TrainerLost
from areal_flow.core.types import PolicyHashes, Rendezvous
from areal_flow.planning.virtual_time import run_in_virtual_time
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.replicas import (
    ConnectedRanks,
    _listen_at,
    connect_ranks,
    leave_ranks,
)
from areal_flow.training.sequences import plan_micro_batches
from areal_flow.training.settings import StepSettings, TrainerSettings
from areal_flow.training.step import train_step
from tests.policies import small_policy
from tests.unit.test_trainer import make_sequences, settings, state

HASHES = PolicyHashes("weights", "served")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_neither_packing_nor_ranks_change_gradient_and_metrics_of_an_algorithm(name: str) -> None:
    """Also with more ranks than sequences, so that batches may be empty."""
    algorithm = ALGORITHMS[name](num_minibatches=1)

    def step_on(num_ranks: int, max_tokens: int) -> tuple[torch.Tensor, dict[str, float]]:
        backend = state(
            num_ranks=num_ranks,
            learning_rate=1e-12,
            max_grad_norm=1e9,
            tokens_per_micro_batch=max_tokens,
        )
        how = StepSettings(algorithm, temperature=1.0, seed=0)
        if isinstance(algorithm, ActorCriticPPO):
            backend.add_critic(algorithm)
        metrics = train_step(backend, make_sequences(), step=1, settings=how).metrics
        gradients = torch.cat([p.grad.flatten() for p in backend.policy.parameters()])
        return gradients, {name: metric.value for name, metric in metrics.items()}

    expected, metrics_of_whole = step_on(1, 4096)
    for num_ranks, max_tokens in ((1, 20), (3, 32), (20, 64)):
        gradients, metrics = step_on(num_ranks, max_tokens)
        assert float((gradients - expected).abs().max() / expected.abs().max()) < 1e-5
        assert metrics == pytest.approx(metrics_of_whole, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_sequence_is_some_ranks_and_batches_are_alike(num_ranks: int) -> None:
    sequences, how = make_sequences(50), settings(num_minibatches=2)
    plan = plan_micro_batches(sequences, step=1, settings=how, max_tokens=64, num_ranks=num_ranks)
    planned = [i for minibatch in plan for of_rank in minibatch for m in of_rank for i in m]
    assert sorted(planned) == list(range(50))
    for minibatch in plan:
        assert len(minibatch) == num_ranks
        assert len({len(micro_batches) for micro_batches in minibatch}) == 1
        assert all(micro_batches for micro_batches in minibatch)
        tokens = [sum(sequences[i].num_tokens for micro in s for i in micro) for s in minibatch]
        assert max(tokens) - min(tokens) <= 64


def test_rank_that_was_replaced_while_its_group_connects_is_refused(tmp_path: Path) -> None:
    point = tmp_path / "rendezvous"
    store = torch.distributed.FileStore(str(point), 2)
    store.add("came-1", 1)
    with pytest.raises(TrainerLost, match="rank 1 was replaced"):
        connect_ranks(Rendezvous("replicas", 1, 2), point, host="127.0.0.1")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[ConnectedRanks]:
    point = tmp_path / "point"
    yield connect_ranks(Rendezvous("one", 0, 1), point, host="127.0.0.1", timeout_s=700.0)
    leave_ranks()


def test_an_exchange_waits_for_a_checkpoint_of_the_weights_size(
    one_rank: ConnectedRanks, tmp_path: Path
) -> None:
    assert exchange_timeout_s("cuda", tmp_path) == 600
    with (tmp_path / "model-00001-of-00002.safetensors").open("wb") as file:
        file.truncate(14_000_000_000)
    assert exchange_timeout_s("cuda", tmp_path) == 1300
    assert exchange_timeout_s("cpu", tmp_path) == 4300
    group = torch.distributed.group.WORLD
    assert group is not None
    options = group._get_backend(torch.device("cpu")).options
    assert options._timeout == timedelta(seconds=700)


def test_ranks_listen_at_the_interface_of_their_host(
    one_rank: ConnectedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's name is exact, and one that the user gave stays."""
    loopback = os.environ["GLOO_SOCKET_IFNAME"]
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={loopback}"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    _listen_at("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


def test_a_reference_is_gathered_only_during_its_passes(one_rank: ConnectedRanks) -> None:
    backend = TrainerBackend(small_policy(), TrainerSettings(), one_rank)
    reference = small_policy(seed=1)
    backend.hold_reference(reference)
    embedding = reference.get_input_embeddings()
    gathered = []

    def note(*_: Any) -> None:
        gathered.append(not isinstance(embedding.weight, DTensor))

    embedding.register_forward_hook(note)
    how = StepSettings(ALGORITHMS["decoupled_ppo"](kl_coefficient=0.1), temperature=1.0, seed=0)
    train_step(backend, make_sequences(), step=1, settings=how)
    assert gathered
    assert all(gathered)
    assert isinstance(embedding.weight, DTensor)


class FakeRanks:
    """A Dask client whose ranks answer after some time; one that never answers can be replaced."""

    def __init__(self, *answers: tuple[float, Any]) -> None:
        self._answers = answers
        self._replaced = {f"trainer-{rank}": asyncio.Event() for rank in range(len(answers))}
        self.replaced: list[str] = []

    def submit(self, function: Any, *arguments: Any, resources: dict[str, int], **_: Any) -> Any:
        (name,) = resources
        return self._answer(name, *self._answers[int(name.rpartition("-")[2])])

    async def _answer(self, name: str, after_s: float, answer: Any) -> Any:
        try:
            await asyncio.wait_for(self._replaced[name].wait(), after_s)
            raise TrainerLost(f"{name} was replaced")
        except TimeoutError:
            if isinstance(answer, Exception):
                raise answer from None
            return answer

    async def replace(self, name: str, *, why: str) -> None:
        self.replaced.append(name)
        self._replaced[name].set()


def restored(*answers: tuple[float, Any]) -> tuple[PolicyHashes | Exception, Sequence[str], float]:
    """Return the outcome of such ranks, which were replaced, and the seconds it took."""

    async def restore() -> Any:
        ranks = FakeRanks(*answers)
        replicas = TrainerReplicas(ranks, num_ranks=len(answers), replace=ranks.replace)
        try:
            result: PolicyHashes | Exception = await replicas.restore(3)
        except ArealFlowError as error:
            result = error
        return result, ranks.replaced, asyncio.get_running_loop().time()

    return run_in_virtual_time(restore())


def test_replica_group_answers_when_all_ranks_agree() -> None:
    assert restored((1.0, HASHES), (5.0, HASHES)) == (HASHES, [], 5.0)


def test_ranks_with_different_weights_are_lost() -> None:
    outcome, replaced, _ = restored((1.0, HASHES), (1.0, replace(HASHES, weights_hash="others")))
    assert isinstance(outcome, TrainerLost)
    assert "hold different weights" in str(outcome)
    assert replaced == []


def test_failure_that_caused_the_others_is_raised() -> None:
    full = StorageError("the disk is full")
    outcome, replaced, _ = restored((1.0, TrainerLost("another rank left")), (2.0, full))
    assert outcome is full
    assert replaced == []


def test_failed_gpu_is_reported_before_the_ranks_that_noticed_it() -> None:
    failed = DeviceError("out of memory")
    outcome, replaced, _ = restored((1.0, TrainerLost("another rank left")), (2.0, failed))
    assert outcome is failed
    assert replaced == ["trainer-1"]


def test_rank_that_does_not_notice_the_end_of_its_group_is_replaced() -> None:
    outcome, replaced, seconds = restored((1.0, TrainerLost("it died")), (1e6, HASHES))
    assert isinstance(outcome, TrainerLost)
    assert replaced == ["trainer-1"]
    assert seconds == pytest.approx(1.0 + NOTICE_S)


def test_rank_that_cannot_read_ahead_is_left_alone() -> None:
    """Its next step reads what it needs: a hint must neither fail nor replace anybody."""
    ranks = FakeRanks((1.0, TrainerLost("it died")), (5.0, None))
    replicas = TrainerReplicas(ranks, num_ranks=2, replace=ranks.replace)

    async def seconds() -> float:
        await replicas.read_ahead(["00000000-0000-00"])
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(seconds()) == pytest.approx(5.0)
    assert ranks.replaced == []
