"""Decoupled PPO: the design's golden values and a float64 brute force with its gradient."""

from __future__ import annotations

from math import exp, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_flow.algorithms.logprobs import next_token_logprobs
from areal_flow.algorithms.losses import ImportanceWeightRule, PolicyLoss, decoupled_ppo_loss

LOGPROBS = [-1.0, -0.5, -2.0]
PROXIMAL = [-1.1, -0.7, -1.6]
BEHAVIOR = [-1.5, -0.4, -3.5]
ADVANTAGES = [1.0, -1.0, 2.0]


def golden_loss(rule: ImportanceWeightRule) -> PolicyLoss:
    return decoupled_ppo_loss(
        torch.tensor(LOGPROBS, dtype=torch.float64),
        proximal_logprobs_T=torch.tensor(PROXIMAL, dtype=torch.float64),
        behavior_logprobs_T=torch.tensor(BEHAVIOR, dtype=torch.float64),
        advantages_T=torch.tensor(ADVANTAGES, dtype=torch.float64),
        importance_weight_rule=rule,
        importance_weight_cap=5.0,
    )


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("full", -3.235754), ("truncate", -2.482361), ("mask", -0.247961)],
)
def test_golden_losses(rule: ImportanceWeightRule, expected: float) -> None:
    assert float(golden_loss(rule).loss_sum) / 3 == pytest.approx(expected, abs=1e-6)


def test_golden_weights() -> None:
    weights = [exp(p - b) for p, b in zip(PROXIMAL, BEHAVIOR, strict=True)]
    assert weights == pytest.approx([1.4918, 0.7408, 6.6859], abs=1e-4)
    loss = golden_loss("full")
    assert float(loss.importance_weight_max) == pytest.approx(max(weights))
    assert float(loss.importance_weight_sum) == pytest.approx(sum(weights))


token = st.tuples(st.floats(-4, 0), st.floats(-4, 0), st.floats(-4, 0), st.floats(-3, 3))


@given(st.lists(token, min_size=1, max_size=12), st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_loss_and_gradient_equal_brute_force(
    tokens: list[tuple[float, float, float, float]], low: float, high: float
) -> None:
    columns = [torch.tensor(c, dtype=torch.float64) for c in zip(*tokens, strict=True)]
    logprobs = columns[0].requires_grad_()
    loss = decoupled_ppo_loss(
        logprobs,
        proximal_logprobs_T=columns[1],
        behavior_logprobs_T=columns[2],
        advantages_T=columns[3],
        epsilon_low=low,
        epsilon_high=high,
    ).loss_sum
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
            assert float(logprobs.grad[index]) == pytest.approx(gradient, rel=1e-9, abs=1e-12)
    assert float(loss.detach()) == pytest.approx(total, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.5, 1.0, -1.2), (0.5, 1.0, -0.5), (1.5, -1.0, 1.5), (0.5, -1.0, 0.8), (1.1, 2.0, -2.2)],
)
def test_clip_ends_a_fifth_from_the_proximal_policy(
    ratio: float, advantage: float, expected: float
) -> None:
    loss = decoupled_ppo_loss(
        torch.tensor([log(ratio)], dtype=torch.float64),
        proximal_logprobs_T=torch.zeros(1, dtype=torch.float64),
        behavior_logprobs_T=torch.zeros(1, dtype=torch.float64),
        advantages_T=torch.tensor([advantage], dtype=torch.float64),
    )
    assert float(loss.loss_sum) == pytest.approx(expected)


def test_first_minibatch_is_never_clipped() -> None:
    logprobs = torch.tensor(LOGPROBS)
    loss = decoupled_ppo_loss(
        logprobs,
        proximal_logprobs_T=logprobs,
        behavior_logprobs_T=torch.tensor(BEHAVIOR),
        advantages_T=torch.tensor(ADVANTAGES),
    )
    assert int(loss.num_clipped) == 0


def test_logprobs_use_the_sampling_temperature() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
    found = next_token_logprobs(logits, torch.tensor([1]), temperature=2.0)
    scores = [exp(value / 2.0) for value in (1.0, 2.0, 4.0)]
    assert float(found) == pytest.approx(
        torch.tensor(scores[1] / sum(scores)).log().item(), rel=1e-5
    )
