"""The critic: its predictions, the advantages, and its place in the trainer's state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from areal_flow.algorithms.protocol import AdvantageInputs, PolicyLoss
from areal_flow.algorithms.registry import ActorCriticPPO, CriticSettings, DecoupledPPO
from areal_flow.core.errors import ConfigError
from areal_flow.core.types import CRITIC_SKIPPED_UPDATES, NOTHING_TRAINED
from areal_flow.policy.models.hashing import hash_tensors
from areal_flow.policy.models.reward_model import critic_of
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.critic import PREFIX, Critic
from areal_flow.training.settings import StepSettings
from areal_flow.training.step import advantage_inputs, train_step
from tests.policies import served_weights, small_policy
from tests.unit.test_advantages import slow_gae
from tests.unit.test_trainer import hash_of_optimizer, make_sequences, state

ALGORITHM = ActorCriticPPO(num_minibatches=2)


def with_critic(
    seed: int = 0, algorithm: ActorCriticPPO = ALGORITHM, **options: Any
) -> TrainerBackend:
    backend = state(seed, **options)
    backend.add_critic(algorithm)
    return backend


def critic(backend: TrainerBackend) -> Critic:
    assert backend.critic is not None
    return backend.critic


def settings(algorithm: ActorCriticPPO = ALGORITHM) -> StepSettings:
    return StepSettings(algorithm, temperature=1.0, seed=0)


def draw_head(backend: TrainerBackend) -> None:
    torch.manual_seed(7)
    torch.nn.init.normal_(critic(backend).model.score.weight)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_values_are_those_before_each_completion_token(num_ranks: int) -> None:
    backend = with_critic(num_ranks=num_ranks, tokens_per_micro_batch=32)
    sequences = make_sequences(5)
    draw_head(backend)
    values_BL = critic(backend).values(sequences)
    model = critic(backend).model
    model.set_attn_implementation("eager")
    for sequence, values_L in zip(sequences, values_BL, strict=True):
        tokens = np.concatenate([sequence.prompt_tokens, sequence.output_tokens])
        hidden = model.get_decoder()(torch.tensor(tokens[None].astype(np.int64))).last_hidden_state
        before = slice(len(sequence.prompt_tokens) - 1, len(tokens) - 1)
        expected = model.score(hidden)[0, before, 0].detach()
        length = len(sequence.output_tokens)
        torch.testing.assert_close(values_L[:length].float(), expected, atol=1e-4, rtol=1e-4)
        assert not values_L[length:].any()


def inputs_with_values(values: list[list[float]], rewards: list[float]) -> AdvantageInputs:
    longest = max(map(len, values))
    padded = [row + [9.0] * (longest - len(row)) for row in values]
    trained = [np.ones(len(row), np.bool_) for row in values]
    trained[0][0] = False
    return AdvantageInputs(
        rewards_B=torch.tensor(rewards, dtype=torch.float64),
        num_trained_B=torch.tensor([sum(row) for row in trained], dtype=torch.float64),
        groups_B=torch.arange(len(values)),
        num_tokens_B=torch.tensor([len(row) for row in values], dtype=torch.float64),
        trained=trained,
        values_BL=torch.tensor(padded, dtype=torch.float64),
    )


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_advantages_are_estimates_of_all_tokens_normalised_over_trained_ones(
    coefficient: float,
) -> None:
    """The KL divergence of trained tokens is part of rewards, estimates and targets."""
    values, rewards = [[0.1, 0.4, 0.2], [0.5, 0.3]], [1.0, 0.0]
    divergences = [[0.0, -0.3, 0.2], [0.7, 0.1]]
    inputs = inputs_with_values(values, rewards)
    critic = CriticSettings(discount=0.9, gae_lambda=0.8)
    algorithm = ActorCriticPPO(critic=critic, kl_coefficient=coefficient, kl_in="reward")
    if algorithm.needs_kl:
        inputs = replace(inputs, kl_N=torch.tensor([-0.3, 0.2, 0.7, 0.1], dtype=torch.float64))
    estimates = []
    for values_of_sequence, reward, kl in zip(values, rewards, divergences, strict=True):
        by_token = [0.0] * (len(values_of_sequence) - 1) + [reward]
        by_token = [r - coefficient * k for r, k in zip(by_token, kl, strict=True)]
        estimates.append(slow_gae(by_token, values_of_sequence, discount=0.9, gae_lambda=0.8))
    trained = np.concatenate([np.asarray(estimates[0])[1:], np.asarray(estimates[1])])
    for advantages, expected in zip(algorithm.advantages(inputs), estimates, strict=True):
        normal = (np.asarray(expected) - trained.mean()) / (trained.std(ddof=1) + 1e-8)
        assert advantages == pytest.approx(normal.tolist())
    for targets_L, expected, value in zip(
        algorithm.value_targets(inputs), estimates, values, strict=True
    ):
        targets = targets_L[: len(value)].tolist()
        assert targets == pytest.approx((np.asarray(expected) + value).tolist())


def value_loss(values: torch.Tensor) -> PolicyLoss:
    targets = torch.tensor([1.0, 1.0, -1.0, 0.1], dtype=torch.float64)
    return ALGORITHM.value_loss(values, torch.zeros(4, dtype=torch.float64), targets)


def test_value_loss_is_the_greater_of_the_free_and_the_clipped_one() -> None:
    values = torch.tensor([0.1, 0.5, 0.5, -0.3], dtype=torch.float64, requires_grad=True)
    loss = value_loss(values)
    # Beyond the clip of 0.2: towards its target the second's loss is that of 0.2, and has no
    # gradient; away from their targets those of the third and the fourth are free.
    expected = [0.81 / 2, 0.64 / 2, 2.25 / 2, 0.16 / 2]
    assert loss.losses_T.tolist() == pytest.approx(expected)
    loss.losses_T.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, 1.5, -0.4])
    assert loss.metrics["critic_clip_fraction"].value == 0.25
    assert torch.autograd.gradcheck(lambda v: value_loss(v).losses_T, (values,))


def test_values_that_stay_near_do_not_count_as_clipped() -> None:
    """In float32, v_old + (v - v_old) often differs from v, with a larger loss."""
    torch.manual_seed(0)
    old, values, targets = torch.randn(3, 10_000) * 0.3
    near = (values - old).abs() < 0.199
    loss = ALGORITHM.value_loss(values[near], old[near], targets[near])
    assert loss.metrics["critic_clip_fraction"].value == 0.0


@pytest.mark.slow
def test_critic_learns_which_prompts_are_rewarded() -> None:
    algorithm = ActorCriticPPO(num_minibatches=1, critic=CriticSettings(learning_rate=3e-3))
    backend = with_critic(algorithm=algorithm)
    rewarded = [
        replace(s, reward=float(s.prompt_tokens[0] % 2), group=index)
        for index, s in enumerate(make_sequences(32))
    ]
    metrics_by_step = [
        train_step(backend, rewarded, step=step, settings=settings(algorithm), rate=1e-9).metrics
        for step in range(1, 41)
    ]
    explained = [metrics["critic_explained_variance"].value for metrics in metrics_by_step]
    assert explained[0] == pytest.approx(0.0, abs=1e-9), "its first values are all 0"
    assert explained[-1] > 0.8
    assert metrics_by_step[-1]["critic_loss"].value < metrics_by_step[0]["critic_loss"].value / 4


def test_critic_is_saved_and_continued_from_to_the_bit() -> None:
    first, second = with_critic(0), with_critic(1)
    train_step(first, make_sequences(seed=1), step=1, settings=settings())
    saved = first.save()
    assert any(name.startswith(PREFIX) for name in saved[1])
    assert not any(PREFIX in name or "score" in name for name in served_weights(first))
    second.load(*saved)
    for backend in (first, second):
        train_step(backend, make_sequences(seed=2), step=2, settings=settings())
    assert first.fingerprint() == second.fingerprint()
    assert hash_of_optimizer(first) == hash_of_optimizer(second)


def test_a_state_without_a_critic_begins_one_and_a_trainer_without_one_leaves_it() -> None:
    """As in a fork with another algorithm than its parent's."""
    plain, other = state(3), with_critic(1)
    train_step(
        plain, make_sequences(), step=1, settings=replace(settings(), algorithm=DecoupledPPO())
    )
    other.load(*plain.save())
    model = critic(other).model
    layers = (policy.get_decoder().state_dict() for policy in (model, plain.policy))
    assert hash_tensors(next(layers)) == hash_tensors(next(layers))
    assert not model.score.weight.any()
    train_step(other, make_sequences(), step=2, settings=settings())
    plain.load(*other.save())
    assert plain.fingerprint() == other.fingerprint()
    assert not any(name.startswith(PREFIX) for name in plain.save()[1])


def test_critic_has_the_layers_of_weights_that_are_loaded_after_it_was_made() -> None:
    backend, other = with_critic(), small_policy(seed=1)
    weights, _ = TrainerBackend(other, backend.settings).save()
    backend.load_weights(weights)
    layers = critic(backend).model.get_decoder().state_dict()
    assert hash_tensors(layers) == hash_tensors(other.get_decoder().state_dict())


def test_architecture_that_nobody_can_score_with_is_refused() -> None:
    policy = small_policy()
    policy.config = type("Unknown", (), {"num_labels": 2, "pad_token_id": 0, "model_type": "odd"})()
    with pytest.raises(ConfigError, match="take an algorithm without a critic"):
        critic_of(policy, device="meta")


def test_batch_without_trained_tokens_has_finite_advantages() -> None:
    sequences = [replace(s, trained=np.zeros_like(s.trained)) for s in make_sequences(3)]
    inputs = advantage_inputs(sequences)
    values_BL = torch.zeros(inputs.padded_trained.shape, dtype=torch.float64)
    inputs = replace(inputs, values_BL=values_BL)
    for advantages in ALGORITHM.advantages(inputs):
        assert np.isfinite(advantages).all()
    train_step(with_critic(), sequences, step=1, settings=settings())


def test_update_that_is_no_number_leaves_the_critic_as_it_is_and_is_counted() -> None:
    backend = with_critic()
    before = hash_tensors(critic(backend).named_state())
    broken = [replace(s, reward=float("nan")) for s in make_sequences()]
    metrics = train_step(backend, broken, step=1, settings=settings()).metrics
    assert metrics["critic_skipped_updates_fraction"].value == 1.0
    assert hash_tensors(critic(backend).named_state()) == before


def test_step_whose_critic_was_not_updated_counts_as_a_skipped_one() -> None:
    """So that several of them in a row end the run."""
    assert not NOTHING_TRAINED.skipped_an_update
    metrics = {CRITIC_SKIPPED_UPDATES: 0.5}
    assert replace(NOTHING_TRAINED, metrics=metrics).skipped_an_update
