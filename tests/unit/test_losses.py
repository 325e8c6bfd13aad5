"""Losses: the design's golden values, float64 brute force, and what every algorithm must hold."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_flow.algorithms.composed import ImportanceWeightRule
from areal_flow.algorithms.logprobs import (
    MAX_LOG_RATIO,
    next_token_entropies,
    sequence_means,
)
from areal_flow.algorithms.protocol import LossInputs, Metric, MinibatchSize, PolicyLoss
from areal_flow.algorithms.registry import ALGORITHMS, GSPO, PPO, DecoupledPPO
from areal_flow.config import build_recipe
from areal_flow.core.errors import ConfigError

LOGPROBS = [-1.0, -0.5, -2.0]
PROXIMAL = [-1.1, -0.7, -1.6]
BEHAVIOR = [-1.5, -0.4, -3.5]
ADVANTAGES = [1.0, -1.0, 2.0]


def inputs(
    logprobs: list[float] = LOGPROBS,
    proximal: list[float] = PROXIMAL,
    behavior: list[float] = BEHAVIOR,
    advantages: list[float] = ADVANTAGES,
    sequence: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> LossInputs:
    columns = (logprobs, proximal, behavior, advantages)
    tensors = [torch.tensor(column, dtype=dtype) for column in columns]
    tensors[0].requires_grad_()
    owners = torch.tensor(sequence or [0] * len(logprobs), dtype=torch.long)
    num_sequences = max(sequence or [0]) + 1
    versions = torch.zeros(len(logprobs), dtype=torch.long)
    return LossInputs(*tensors, owners, versions, num_sequences)


def golden_loss(rule: ImportanceWeightRule) -> PolicyLoss:
    return DecoupledPPO(importance_weight_rule=rule, importance_weight_cap=5.0).loss(inputs())


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("full", -3.235754), ("truncate", -2.482361), ("mask", -0.247961)],
)
def test_golden_losses(rule: ImportanceWeightRule, expected: float) -> None:
    assert float(golden_loss(rule).losses_T.mean()) == pytest.approx(expected, abs=1e-6)


def test_mean_ratio_is_that_of_the_policy_to_the_proximal_one() -> None:
    given = inputs()
    expected = (given.logprobs_T - given.proximal_logprobs_T).exp().mean().item()
    assert golden_loss("full").metrics["ratio_mean"].value == pytest.approx(expected)


def test_golden_weights() -> None:
    weights = [exp(p - b) for p, b in zip(PROXIMAL, BEHAVIOR, strict=True)]
    assert weights == pytest.approx([1.4918, 0.7408, 6.6859], abs=1e-4)
    metrics = golden_loss("full").metrics
    assert metrics["importance_weight_max"].value == pytest.approx(max(weights))
    assert metrics["importance_weight_mean"].value == pytest.approx(sum(weights) / 3)


token = st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.floats(-4, 0), st.floats(-3, 3))


@given(st.lists(token, min_size=1, max_size=12), st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_loss_and_gradient_equal_brute_force(
    tokens: list[tuple[float, float, float, float]], low: float, high: float
) -> None:
    given_ = inputs(*(list(column) for column in zip(*tokens, strict=True)))
    loss = DecoupledPPO(epsilon=low, epsilon_high=high).loss(given_).losses_T.sum()
    loss.backward()
    total = 0.0
    for index, (theta, prox, behav, advantage) in enumerate(tokens):
        u, w = exp(theta - prox), exp(prox - behav)
        clipped = min(max(u, 1 - low), 1 + high)
        total -= w * min(u * advantage, clipped * advantage)
        passes = u * advantage <= clipped * advantage
        gradient = -w * u * advantage if passes else 0.0
        on_edge = abs(u - (1 - low)) < 1e-9 or abs(u - (1 + high)) < 1e-9 or u == clipped
        if not on_edge or passes:
            assert float(given_.logprobs_T.grad[index]) == pytest.approx(
                gradient, rel=1e-9, abs=1e-12
            )
    assert float(loss.detach()) == pytest.approx(total, rel=1e-9, abs=1e-12)


def test_plain_ppo_is_clipped_against_the_sampling_policy() -> None:
    """r = [1.6487, 0.9048, 4.4817], clipped to [1.2, 0.9048, 1.2]: terms 1.2, -0.9048, 2.4."""
    loss = PPO().loss(inputs())
    assert float(loss.losses_T.mean()) == pytest.approx(-0.898388, abs=1e-6)
    assert loss.clipped_T.tolist() == [True, False, True]
    assert loss.metrics["ratio_max"].value == pytest.approx(exp(1.5))


def test_entropy_is_rewarded_by_its_coefficient() -> None:
    logits = torch.tensor([[0.0, log(3.0)]], dtype=torch.float64)
    entropy = next_token_entropies(logits)
    assert float(entropy) == pytest.approx(-0.25 * log(0.25) - 0.75 * log(0.75), rel=1e-6)
    algorithm = PPO(entropy_coefficient=0.5)
    assert algorithm.needs_entropy
    assert not PPO().needs_entropy
    bare = PPO().loss(inputs()).losses_T
    with_bonus = algorithm.loss(replace(inputs(), entropy_T=entropy.expand(3)))
    assert torch.allclose(with_bonus.losses_T, bare - 0.5 * entropy)


def test_aggregations_weigh_long_sequences_as_they_say() -> None:
    losses, sequence = torch.tensor([1.0, 2.0, 3.0, 10.0]), torch.tensor([0, 0, 0, 1])
    size = MinibatchSize(num_tokens=4, num_sequences=2)
    assert sequence_means(losses, sequence, 2).tolist() == [2.0, 10.0]
    for algorithm, expected in (
        (PPO(aggregation="token_mean"), 4.0),
        (PPO(aggregation="sequence_mean"), 6.0),
        (PPO(aggregation="constant", aggregation_tokens=8), 1.0),
    ):
        assert float(algorithm.aggregate(losses, sequence, size, num_sequences=2)) == expected


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_survives_tokens_that_became_likely(name: str) -> None:
    """A ratio of e^100 is infinite in float32: it is bounded, and counted."""
    given_ = inputs([-1.0, -0.5], [-1.0, -0.5], [-101.0, -0.5], [1.0, -1.0], [0, 1], torch.float32)
    loss = ALGORITHMS[name]().loss(given_)
    loss.losses_T.sum().backward()
    assert loss.losses_T.isfinite().all()
    assert given_.logprobs_T.grad.isfinite().all()
    assert loss.metrics["ratio_overflow_fraction"].value == 0.5


def test_bound_is_beyond_what_training_needs_and_within_float32() -> None:
    bounded = DecoupledPPO().loss(inputs([0.0], [0.0], [-100.0], [1.0]))
    assert float(bounded.losses_T) == pytest.approx(-exp(MAX_LOG_RATIO))
    below = DecoupledPPO().loss(inputs([0.0], [0.0], [1 - MAX_LOG_RATIO], [1.0]))
    assert float(below.losses_T) == pytest.approx(-exp(MAX_LOG_RATIO - 1))
    assert below.metrics["ratio_overflow_fraction"].value == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_takes_a_batch_without_a_token(name: str) -> None:
    """As on a rank without work, which must return the same metrics as the others."""
    algorithm = ALGORITHMS[name]()
    nothing, something = algorithm.loss(inputs([], [], [], [])), algorithm.loss(inputs())
    assert nothing.losses_T.shape == (0,)
    assert nothing.metrics.keys() == something.metrics.keys()
    for metric, more in zip(nothing.metrics.values(), something.metrics.values(), strict=True):
        assert metric.add(more) == more


def test_metrics_add_up_by_weight_and_maxima_by_size() -> None:
    assert Metric(3.0, 2.0).add(Metric(5.0, 6.0)).value == 1.0
    assert Metric(3.0, None).add(Metric(5.0, None)).value == 5.0


def test_recipe_takes_the_settings_of_the_algorithm_that_it_names() -> None:
    assert build_recipe({}, source="").algorithm == DecoupledPPO()
    assert build_recipe({"algorithm": {"epsilon": 0.1}}, source="").algorithm.epsilon == 0.1
    gspo = {"name": "gspo", "epsilon": 0.1}
    assert build_recipe({"algorithm": gspo}, source="").algorithm == GSPO(epsilon=0.1)
    with pytest.raises(ConfigError, match=r"algorithm\.dual_clip: 'gspo' has no such"):
        build_recipe({"algorithm": {**gspo, "dual_clip": 3.0}}, source="")
    with pytest.raises(ConfigError, match="expected one of decoupled_ppo, ppo, gspo"):
        build_recipe({"algorithm": {"name": "unknown"}}, source="")


def test_groups_with_equal_rewards_can_be_left_out() -> None:
    assert DecoupledPPO().keeps_group([1.0, 1.0])
    mixed = DecoupledPPO(group_filter="mixed_rewards")
    assert mixed.keeps_group([1.0, 0.0, 1.0])
    assert not mixed.keeps_group([1.0, 1.0])
