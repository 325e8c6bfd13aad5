"""Trainer backends and the step over them: what is updated, by which loss, at which rate."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from areal_flow.algorithms.composed import ComposedAlgorithm
from areal_flow.algorithms.protocol import (
    Advantage,
    AdvantageInputs,
    LossInputs,
    MinibatchSize,
    PolicyLoss,
)
from areal_flow.algorithms.registry import ALGORITHMS, GSPO, PPO, ActorCriticPPO, DecoupledPPO
from areal_flow.config import build_recipe
from areal_flow.core.types import PolicyHashes, VersionSpan
from areal_flow.policy.checkpoints import CheckpointState
from areal_flow.policy.models.hashing import hash_tensors
from areal_flow.policy.models.policy import policy_tensors
from areal_flow.policy.weights import device_copies
from areal_flow.policy.weights.device_copies import DeviceCopier
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.checkpoint import take_snapshot
from areal_flow.training.ranked_model import Minibatch, wait_for_copies
from areal_flow.training.replicas import ReplicaGroup
from areal_flow.training.sequences import pack_sequences, plan_micro_batches
from areal_flow.training.settings import AdamWSettings, StepSettings, TrainerSettings
from areal_flow.training.step import compute_advantages, train_step, update_policy
from tests.policies import KeepingWriter, small_policy
from tests.unit.test_trainer import make_sequences, settings, state


def test_backend_saves_what_it_continues_from() -> None:
    def backend(seed: int) -> TrainerBackend:
        return TrainerBackend(small_policy(seed=seed), TrainerSettings(learning_rate=1e-2))

    first, second = backend(0), backend(1)
    train_step(first, make_sequences(seed=1), step=1, settings=settings())
    saved = first.save()
    second.load(*saved)
    assert second.fingerprint() == first.fingerprint()
    for trained in (first, second):
        train_step(trained, make_sequences(seed=2), step=2, settings=settings())
    assert second.fingerprint() == first.fingerprint()
    second.load(*saved)
    assert second.fingerprint() != first.fingerprint(), "a later update changed what was saved"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_staged_weights_are_those_of_the_step_before_whatever_comes_after(
    dtype: torch.dtype,
) -> None:
    backend = TrainerBackend(small_policy(tied=True), TrainerSettings(learning_rate=1e-2))
    for step in (1, 2):
        train_step(backend, make_sequences(seed=step), step=step, settings=settings())
        weights = policy_tensors(backend.policy)
        expected = {name: tensor.to(dtype, copy=True) for name, tensor in weights.items()}
        fingerprint, writer = backend.fingerprint(), KeepingWriter()
        hashes = backend.stage(step, writer, dtype=dtype)
        train_step(backend, make_sequences(seed=9), step=step, settings=settings())
        assert writer.kept.keys() == expected.keys()
        assert all(torch.equal(writer.kept[name], expected[name]) for name in expected)
        assert hashes == PolicyHashes(fingerprint, hash_tensors(expected))


@pytest.mark.parametrize("algorithm", [DecoupledPPO(), ActorCriticPPO()])
def test_a_snapshot_that_is_copied_beside_the_next_step_is_of_the_step_before(
    algorithm: ComposedAlgorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step computes its gradients meanwhile; its update waits."""
    how = StepSettings(algorithm, temperature=1.0, seed=0)

    def trained(*, seed: int = 0, num_steps: int = 0) -> TrainerBackend:
        backend = TrainerBackend(small_policy(seed=seed), TrainerSettings(learning_rate=1e-2))
        if isinstance(algorithm, ActorCriticPPO):
            backend.add_critic(algorithm)
        for step in range(1, num_steps + 1):
            train_step(backend, make_sequences(seed=step), step=step, settings=how)
        return backend

    may_copy, copy = threading.Event(), DeviceCopier._copy

    def copy_later(*arguments: Any) -> None:
        may_copy.wait()
        copy(*arguments)

    monkeypatch.setattr(DeviceCopier, "_copy", copy_later)
    monkeypatch.setattr(device_copies, "PIECE_BYTES", 4096)
    backend, expected = trained(num_steps=1), trained(num_steps=1)
    backend._copies_beside = True
    snapshot = take_snapshot(backend, CheckpointState(1, "", 0, ""))
    with ThreadPoolExecutor(1) as thread:
        next_step = thread.submit(train_step, backend, make_sequences(seed=2), step=2, settings=how)
        with pytest.raises(TimeoutError):
            next_step.result(1.0)
        assert backend.fingerprint() == expected.fingerprint(), "the update did not wait"
        may_copy.set()
        next_step.result(60)
    assert backend.fingerprint() != expected.fingerprint()
    restored = trained(seed=1)
    wait_for_copies(snapshot.copies)
    restored.load(snapshot.weights, snapshot.optimizer)
    assert restored.fingerprint() == expected.fingerprint()
    train_step(restored, make_sequences(seed=2), step=2, settings=how)
    assert restored.fingerprint() == backend.fingerprint()


def test_an_update_fails_where_its_snapshot_could_not_be_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no pages")

    monkeypatch.setattr(DeviceCopier, "_copy", fail)
    backend = TrainerBackend(small_policy(), TrainerSettings())
    backend._copies_beside = True
    snapshot = take_snapshot(backend, CheckpointState(1, "", 0, ""))
    with pytest.raises(MemoryError):
        train_step(backend, make_sequences(), step=1, settings=settings())
    with pytest.raises(MemoryError):
        wait_for_copies(snapshot.copies)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_frozen_parameters_and_those_without_gradient_stay_as_they_are(num_ranks: int) -> None:
    """With gradients of zero, AdamW's weight decay and moments would move them."""
    policy = small_policy()
    policy.model.embed_tokens.weight.requires_grad_(False)
    policy.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    adamw = AdamWSettings(weight_decay=0.5)
    chosen = TrainerSettings(learning_rate=1e-2, adamw=adamw)
    backend = TrainerBackend(policy, chosen, ReplicaGroup(num_ranks))
    for step in (1, 2):
        train_step(backend, make_sequences(seed=step), step=step, settings=settings())
    still = {name for name, p in policy.named_parameters() if torch.equal(p, before[name])}
    assert still == {"model.embed_tokens.weight", "unused"}
    assert not any(name.startswith(tuple(still)) for name in backend.optimizer.named_state())


def test_group_belongs_to_one_minibatch() -> None:
    sequences = make_sequences(48)  # 12 groups of 4
    plans = set()
    for step in range(5):
        plan = plan_micro_batches(
            sequences, step=step, settings=settings(num_minibatches=4), max_tokens=64
        )
        groups = [
            {
                sequences[i].group
                for micro_batches in planned
                for micro in micro_batches
                for i in micro
            }
            for planned in plan
        ]
        assert sorted(group for minibatch in groups for group in minibatch) == list(range(12))
        assert [len(minibatch) for minibatch in groups] == [3] * 4
        plans.add(str(groups))
    assert len(plans) == 5, "each step draws an order of its own"


def test_learning_rate_warms_up_in_the_configured_number_of_steps() -> None:
    trained = state(learning_rate=0.8, num_warmup_steps=3)
    rates = []
    for step in (1, 2, 3, 4, 5):
        train_step(trained, make_sequences(4), step=step, settings=settings(num_minibatches=1))
        rates.append(trained.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])


def gspo_settings(**options: float) -> StepSettings:
    algorithm = GSPO(num_minibatches=1, epsilon=10.0, epsilon_high=10.0, **options)  # type: ignore[arg-type]
    return StepSettings(algorithm, temperature=1.0, seed=0)


def test_gspo_gradient_equals_the_loss_written_out() -> None:
    """With separate forward passes, on sequences whose tokens are partly masked."""
    sequences, how = make_sequences(), gspo_settings()
    assert any(0 < s.num_trained < len(s.output_tokens) for s in sequences)
    backend = state(learning_rate=1e-12, max_grad_norm=1e9)
    train_step(backend, sequences, step=1, settings=how)
    policy = small_policy()
    policy.set_attn_implementation("eager")
    advantages = compute_advantages(sequences, how.algorithm)
    total = torch.zeros(())
    for sequence, advantage in zip(sequences, advantages, strict=True):
        tokens = [*sequence.prompt_tokens, *sequence.output_tokens]
        logprobs = policy(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        log_ratios = [
            logprobs[len(sequence.prompt_tokens) + at - 1, token] - sequence.behavior_logprobs[at]
            for at, token in enumerate(sequence.output_tokens)
            if sequence.trained[at]
        ]
        total = total - torch.stack(log_ratios).mean().exp() * advantage
    (total / len(sequences)).backward()
    for ours, parameter in zip(backend.policy.parameters(), policy.parameters(), strict=True):
        scale = max(1e-6, float(parameter.grad.abs().max()))
        assert float((ours.grad - parameter.grad).abs().max()) / scale < 1e-3


def test_entropy_reaches_the_loss_that_needs_it() -> None:
    algorithm = PPO(num_minibatches=1, entropy_coefficient=0.1)
    how = StepSettings(algorithm, temperature=1.0, seed=0)
    numbers = train_step(state(), make_sequences(), step=1, settings=how)
    assert 0 < numbers.metrics["entropy_mean"].value < torch.tensor(13.0).log()
    more = train_step(state(num_ranks=20), make_sequences(), step=1, settings=how)
    assert more.metrics["entropy_mean"].value == pytest.approx(
        numbers.metrics["entropy_mean"].value, rel=1e-5
    )


@pytest.mark.parametrize("name", sorted({*ALGORITHMS} - {"ppo_critic"}))
def test_no_algorithm_without_a_critic_pads_a_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`[B, L]` of 8,192 trajectories of 27,648 tokens would take 450 MB."""
    monkeypatch.delattr(AdvantageInputs, "padded_trained")
    algorithm = build_recipe({"algorithm": {"name": name}}, source="").algorithm
    how = StepSettings(algorithm, temperature=1.0, seed=0)
    assert train_step(state(), make_sequences(), step=1, settings=how).metrics["clip_fraction"]


def test_entropy_is_watched_whatever_the_loss_needs() -> None:
    """The same number, and the same update, with and without a gradient through it."""
    results = []
    for algorithm in (PPO(num_minibatches=1), Watching(num_minibatches=1), GSPO(num_minibatches=1)):
        how = StepSettings(algorithm, temperature=0.7, seed=0)
        backend = state()
        numbers = train_step(backend, make_sequences(), step=1, settings=how)
        results.append((numbers.metrics["entropy_mean"], backend.fingerprint()))
    assert results[0] == results[1]
    assert results[0][0] == results[2][0]


class Watching(PPO):
    """PPO without an entropy bonus that gets the entropy with its gradient."""

    @property
    def needs_entropy(self) -> bool:
        return True


class DiscountedPPO(PPO):
    """A user's algorithm: advantages decrease towards the end of a completion."""

    def advantages(self, inputs: AdvantageInputs) -> list[Advantage]:
        lengths = [int(num) for num in inputs.num_trained_B]
        return [[1.0 / (1 + at) for at in range(num)] for num in lengths]

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        assert inputs.versions_T.tolist() == [4, 5, 5]
        assert inputs.advantages_T.tolist() == [1.0, 0.5, pytest.approx(1 / 3)]
        return super().loss(inputs)


def test_advantages_may_differ_by_token_and_tokens_carry_their_version() -> None:
    (sequence,) = make_sequences(1)
    spans = (VersionSpan(4, 1), VersionSpan(5, 2))
    sequence = replace(sequence, trained=np.ones(3, np.bool_), version_spans=spans)
    algorithm = DiscountedPPO(num_minibatches=1)
    how = StepSettings(algorithm, temperature=1.0, seed=0)
    numbers = train_step(state(), [sequence], step=1, settings=how)
    assert numbers.metrics["ratio_mean"].weight == 3


def test_backend_makes_one_update_of_any_loss() -> None:
    """As supervised fine-tuning does: the negative log-likelihood of completions."""
    backend, (sequence,) = state(learning_rate=1e-2), make_sequences(1)
    micro = pack_sequences([sequence])
    before = backend.trained.logprobs(micro, 1.0)
    how = replace(settings(), loss=lambda inputs: PolicyLoss(-inputs.logprobs_T))
    size = MinibatchSize(sequence.num_trained, 1)
    minibatch = Minibatch({0: [micro]}, size, learning_rate=1e-2, settings=how)
    numbers = update_policy(backend, minibatch)
    after = backend.trained.logprobs(micro, 1.0)
    assert numbers.losses == [pytest.approx(-float(before.mean()), rel=1e-5)]
    assert set(numbers.metrics) == {"entropy_mean"}
    assert float(after.mean()) > float(before.mean())
