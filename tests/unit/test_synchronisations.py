"""How often a training step waits for its device, on tensors without numbers: torch's `meta`.

A number that the host reads of them is counted and is 1; what a shape would depend on raises.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from areal_flow.algorithms.protocol import LossInputs, PolicyLoss
from areal_flow.algorithms.registry import ALGORITHMS, DecoupledPPO
from areal_flow.core.types import VersionSpan
from areal_flow.policy.models.attention import to_device
from areal_flow.policy.models.lora import add_adapter
from areal_flow.policy.settings import LoraSettings
from areal_flow.training import head
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.ranked_model import UpdateNumbers
from areal_flow.training.sequences import MicroBatches
from areal_flow.training.settings import SftSettings, StepSettings, TrainerSettings
from areal_flow.training.sft import SftTrainer
from areal_flow.training.step import train_step
from areal_flow.training.supervised import OBJECTIVES
from tests.policies import completion_rows, small_policy
from tests.unit.test_reference_top_k import use_head_of
from tests.unit.test_trainer import make_sequences

ON_DEVICE = TrainerSettings(device="meta", tokens_per_micro_batch=32)


class Synchronisations(TorchDispatchMode):
    """Counts reads of `meta` tensors on the host, and copies other than by `to_device`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0
        self.num_copies = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensor = next((each for each in args if isinstance(each, Tensor)), None)
        if tensor is None:
            return function(*args, **kwargs)
        copies = function is torch.ops.aten._to_copy.default
        target = kwargs.get("device", tensor.device).type
        if tensor.is_meta and function is torch.ops.aten._local_scalar_dense.default:
            self.num_reads += 1
            return 1.0
        if tensor.is_meta and copies and target == "cpu":
            self.num_reads += 1
            return torch.ones(tensor.shape, dtype=kwargs.get("dtype", tensor.dtype))
        if copies and not tensor.is_meta and target == "meta":
            self.num_copies += not _is_within(to_device.__code__)
        return function(*args, **kwargs)


def _is_within(code: Any) -> bool:
    frame = sys._getframe()
    while frame := frame.f_back:
        if frame.f_code is code:
            return True
    return False


@pytest.fixture(autouse=True)
def _autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` has no other precision than the tensors' own."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(head, "pass_dtype", lambda tensor: tensor.dtype)


def counted_step(
    algorithm: Any, sequences: Any = None, policy: Any = None, **step: Any
) -> tuple[Synchronisations, UpdateNumbers]:
    backend = TrainerBackend((policy or small_policy()).to("meta"), ON_DEVICE)
    if policy is None:
        backend.hold_reference(small_policy().to("meta"))
    if algorithm.needs_critic:
        backend.add_critic(algorithm)
    settings = StepSettings(algorithm, temperature=0.9, seed=0, **step)
    with Synchronisations() as counted:
        numbers = train_step(backend, sequences or make_sequences(), step=3, settings=settings)
    assert len(numbers.losses) == algorithm.num_minibatches
    return counted, numbers


@pytest.mark.parametrize(
    ("name", "kl_in"),
    [*((name, "loss") for name in ALGORITHMS), ("ppo_critic", "reward"), ("m2po", "advantage")],
)
def test_step_of_every_algorithm_waits_twice_a_minibatch_at_most(name: str, kl_in: str) -> None:
    """With entropy, divergence and importance weights; a critic has minibatches of its own."""
    settings = {"entropy_coefficient": 0.1, "kl_coefficient": 0.1, "kl_in": kl_in}
    algorithm = ALGORITHMS[name](num_minibatches=3, **settings)
    counted, numbers = counted_step(algorithm)
    num_updates = 3 * (1 + algorithm.needs_critic)
    assert counted.num_reads == num_updates + algorithm.needs_kl + algorithm.needs_critic
    assert counted.num_reads <= 2 * num_updates
    assert counted.num_copies == 0
    assert numbers.metrics["entropy_mean"].value > 0


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_step_of_an_adapter_waits_as_often(kl_in: str) -> None:
    """Its reference is the policy without it."""
    policy = small_policy()
    add_adapter(policy, LoraSettings(rank=2))
    algorithm = DecoupledPPO(num_minibatches=3, kl_coefficient=0.1, kl_in=kl_in)
    counted, _ = counted_step(algorithm, policy=policy)
    assert counted.num_reads == 3 + algorithm.needs_kl
    assert counted.num_copies == 0


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_likely_tokens_wait_for_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_head_of(device, monkeypatch)
    algorithm = DecoupledPPO(num_minibatches=3, kl_coefficient=0.1, reference_top_k=4)
    counted, _ = counted_step(algorithm)
    assert (counted.num_reads, counted.num_copies) == (3, 0)


@pytest.mark.parametrize("rule", ["truncate", "mask", "mask_sequence"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_rules_and_means_by_sequence_wait_for_nothing_else(rule: Any, aggregation: Any) -> None:
    algorithm = DecoupledPPO(importance_weight_rule=rule, aggregation=aggregation)
    counted, _ = counted_step(algorithm)
    assert (counted.num_reads, counted.num_copies) == (2, 0)


def test_gap_to_the_engine_is_read_once_a_step() -> None:
    fresh = [
        replace(s, version_spans=(VersionSpan(2, len(s.output_tokens)),)) for s in make_sequences()
    ]
    counted, numbers = counted_step(DecoupledPPO(num_minibatches=3), fresh)
    assert (counted.num_reads, counted.num_copies) == (3 + 1, 0)
    assert "engine_gap/tokens" in numbers.metrics


def test_loss_that_reads_a_number_is_counted_at_each_micro_batch() -> None:
    num_micro_batches = 0

    def loss(inputs: LossInputs) -> PolicyLoss:
        nonlocal num_micro_batches
        num_micro_batches += 1
        policy_loss = DecoupledPPO().loss(inputs)
        return replace(
            policy_loss, losses_T=policy_loss.losses_T * float(inputs.logprobs_T.detach().max())
        )

    counted, _ = counted_step(DecoupledPPO(), loss=loss)
    assert num_micro_batches > 4
    assert counted.num_reads == 2 + num_micro_batches


def test_loss_whose_shape_a_number_decides_fails() -> None:
    def loss(inputs: LossInputs) -> PolicyLoss:
        return PolicyLoss(inputs.logprobs_T[inputs.advantages_T > 0])

    with pytest.raises(NotImplementedError, match="nonzero"):
        counted_step(DecoupledPPO(), loss=loss)


def test_tensor_that_is_made_beside_the_one_way_to_the_device_is_counted() -> None:
    def loss(inputs: LossInputs) -> PolicyLoss:
        weights = torch.tensor([1.0, 2.0]).to(inputs.logprobs_T.device)
        return PolicyLoss(-inputs.logprobs_T * weights.sum())

    assert counted_step(DecoupledPPO(), loss=loss)[0].num_copies > 4


@pytest.mark.parametrize("objective", ["cross_entropy", "dpo"])
def test_supervised_step_waits_once(objective: Any) -> None:
    rows = completion_rows(8, num_completions=len(OBJECTIVES[objective].fields))
    settings = SftSettings(objective=objective, num_steps=2, batch_size=4, num_held_out=2)
    policy = small_policy().to("meta")
    with Synchronisations() as counted:
        trainer = SftTrainer(policy, rows, settings, ON_DEVICE, seed=0)
        before = counted.num_reads
        trainer.take_step()
    assert (counted.num_reads - before, counted.num_copies) == (1, 0)


def test_minibatch_is_laid_out_once_for_all_of_its_passes_beside_the_cpu() -> None:
    sequences, packed = make_sequences(6), [[0, 3], [1, 2], [4, 5]]
    kept = MicroBatches(sequences, packed, "meta")
    assert [id(micro) for micro in kept] == [id(micro) for micro in kept]
    fresh = MicroBatches(sequences, packed)
    assert fresh[0] is not fresh[0]
    assert fresh.kept == {}
