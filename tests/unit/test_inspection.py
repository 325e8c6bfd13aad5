"""Inspection of a step, token by token, against forward passes of single sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from areal_flow.algorithms.registry import PPO, DecoupledPPO
from areal_flow.core.types import StepRequest, VersionSpan
from areal_flow.training.inspection import (
    ClipWatch,
    InspectedTrajectory,
    TrajectoryOutcome,
    completion_logprobs,
    inspect_trajectories,
    trajectory_outcomes,
)
from areal_flow.training.ranked_model import UpdateNumbers
from areal_flow.training.settings import StepSettings
from areal_flow.training.step import train_step
from tests.unit.test_trainer import make_sequences, settings, state


def test_every_completion_token_is_inspected_masked_or_not() -> None:
    before, sequences = state(), make_sequences(5)
    logprobs_by_sequence = completion_logprobs(before, sequences, temperature=0.7)
    policy = before.policy
    policy.set_attn_implementation("eager")
    for sequence, logprobs in zip(sequences, logprobs_by_sequence, strict=True):
        tokens = [*sequence.prompt_tokens, *sequence.output_tokens]
        with torch.no_grad():
            logits = policy(input_ids=torch.tensor([tokens])).logits[0] / 0.7
        first = len(sequence.prompt_tokens) - 1
        alone = [
            float(logits.log_softmax(-1)[first + at, token])
            for at, token in enumerate(sequence.output_tokens)
        ]
        assert logprobs == pytest.approx(alone, abs=1e-4)


def test_clipped_tokens_are_those_that_the_step_counted() -> None:
    """A minibatch a sequence, one with nothing to train, and updates large enough to clip."""
    how = settings(num_minibatches=12, advantage="batch_norm")
    trained = state(learning_rate=3e-2)
    how = replace(how, loss=ClipWatch(how.algorithm.loss))
    sequences = [replace(s, group=index) for index, s in enumerate(make_sequences())]
    sequences[3] = replace(sequences[3], trained=np.zeros_like(sequences[3].trained))
    numbers = train_step(trained, sequences, step=1, settings=how)
    outcomes = trajectory_outcomes(
        trained,
        sequences,
        numbers,
        how.loss,
        temperature=1.0,
    )
    num_clipped = numbers.metrics["clip_fraction"].total
    assert sum(sum(outcome.clipped) for outcome in outcomes) == num_clipped > 0
    for sequence, outcome in zip(sequences, outcomes, strict=True):
        assert list(outcome.trained) == sequence.trained.tolist()
        assert not any(c and not t for c, t in zip(outcome.clipped, outcome.trained, strict=True))


@pytest.mark.parametrize("num_ranks", [1, 20])
@pytest.mark.parametrize("kind", [PPO, DecoupledPPO])
def test_divergence_in_the_reward_is_of_the_policy_before_the_step(
    kind: Any, num_ranks: int
) -> None:
    """Against full passes of both policies: the sampling one, or the one before the step.

    The advantages that are shown are those that were trained, on average over trained tokens.
    """
    algorithm = kind(advantage="batch_norm", kl_coefficient=0.3, kl_estimator="k1", kl_in="reward")
    how = StepSettings(algorithm, temperature=0.7, seed=0)
    how = replace(how, loss=ClipWatch(algorithm.loss))
    sequences, backend = make_sequences(), state(num_ranks=num_ranks)
    policy = completion_logprobs(backend, sequences, temperature=0.7)
    reference = completion_logprobs(state(seed=1), sequences, temperature=0.7)
    backend.hold_reference(state(seed=1).policy)
    numbers = train_step(backend, sequences, step=1, settings=how)
    divergences, returns = [], []
    for sequence, before, reference_logprobs in zip(sequences, policy, reference, strict=True):
        own = before if kind is DecoupledPPO else sequence.behavior_logprobs
        kl = np.subtract(own, reference_logprobs)[sequence.trained]
        divergences.append(kl)
        returns.append(sequence.reward - 0.3 * kl[::-1].cumsum()[::-1])
    flat = np.concatenate(returns)
    for actual, sequence, each in zip(numbers.advantages, sequences, returns, strict=True):
        assert isinstance(actual, np.ndarray)
        assert not actual[~sequence.trained].any()
        expected = (each - flat.mean()) / flat.std(ddof=1)
        np.testing.assert_allclose(actual[sequence.trained], expected, atol=1e-4)
    watched = numbers.metrics["kl_policy_reference"].value
    assert watched == pytest.approx(np.concatenate(divergences).mean(), abs=1e-5)
    advantages = numbers.advantages
    outcomes = (
        trajectory_outcomes(backend, sequences, numbers, how.loss, temperature=0.7)
        if num_ranks == 1
        else []
    )
    for outcome, advantage, sequence in zip(outcomes, advantages, sequences, strict=False):
        assert outcome.advantage == pytest.approx(np.asarray(advantage)[sequence.trained].mean())


def test_watching_a_loss_changes_nothing() -> None:
    plain, watched = state(), state()
    train_step(plain, make_sequences(), step=1, settings=settings())
    how = settings()
    watch = ClipWatch(how.algorithm.loss)
    train_step(watched, make_sequences(), step=1, settings=replace(how, loss=watch))
    assert plain.fingerprint() == watched.fingerprint()


def test_differences_are_those_of_the_change_or_else_of_the_step() -> None:
    before = state()
    (sequence,) = make_sequences(1)
    untrained = [replace(sequence, trained=np.zeros(3, np.bool_))]
    numbers = UpdateNumbers(advantages=[0.0], plan=[[[[0]]]])
    watch = ClipWatch(DecoupledPPO().loss)
    (outcome,) = trajectory_outcomes(before, untrained, numbers, watch, temperature=1.0)
    replayed = replace(outcome, logprobs=(-1.0, -2.0, -3.0))
    trajectory = InspectedTrajectory(
        trajectory_id="t",
        reward=1.0,
        tokens=(1, 2, 3),
        versions=(0, 0, 1),
        too_old=(False, False, False),
        staleness_max=1,
        behavior_logprobs=(-1.0, -1.0, -1.0),
        proximal_logprobs=(-1.0, -1.5, -1.0),
        replayed=replayed,
    )
    assert trajectory.differences == (0.0, -0.5, -2.0)
    assert trajectory.importance_weights == pytest.approx((1.0, 0.6065307, 1.0))
    changed = replace(trajectory, changed=replace(replayed, logprobs=(-1.0, -2.0, -2.0)))
    assert changed.differences == (0.0, 0.0, 1.0)
    assert changed.mean_difference == pytest.approx(1 / 3)


def test_tokens_beyond_the_bound_of_staleness_are_marked() -> None:
    (sequence,) = make_sequences(1)
    spans = (VersionSpan(2, 1), VersionSpan(3, 2))
    outcome = TrajectoryOutcome(0.0, (False, True, False), (False,) * 3, (0.0,) * 3)
    request = StepRequest(5, "", 4, ("t",), "", max_staleness=1)
    (inspection,) = inspect_trajectories(
        request, [replace(sequence, version_spans=spans)], [(0.0,) * 3], [outcome], None
    )
    assert inspection.too_old == (True, False, False)
