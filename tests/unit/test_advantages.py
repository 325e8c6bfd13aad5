"""Advantages: golden numbers, float64 brute force, invariances."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_flow.algorithms.advantages import (
    GAE_BLOCK,
    batch_norm_advantages,
    dr_grpo_advantages,
    gae,
    grpo_advantages,
    overlong_penalties,
    reinforce_baseline_advantages,
    rloo_advantages,
)
from areal_flow.algorithms.protocol import AdvantageInputs
from areal_flow.algorithms.registry import PPO, ReinforcePlusPlus

rewards = st.lists(st.floats(-5, 5), min_size=2, max_size=24)


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_paper_golden() -> None:
    """Rewards 10 (r - 0.5), epsilon 1e-5: bias and scale change nothing else."""
    advantages = batch_norm_advantages(tensor([1, 0]), tensor([4, 4]))
    assert advantages.tolist() == pytest.approx([0.9354126, -0.9354126], abs=1e-7)


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 30)), min_size=2, max_size=20))
def test_paper_advantages_equal_token_level_brute_force(pairs: list[tuple[float, int]]) -> None:
    rewards_B, lengths_B = zip(*pairs, strict=True)
    per_token = np.repeat([10 * (r - 0.5) for r in rewards_B], lengths_B)
    expected = (np.array([10 * (r - 0.5) for r in rewards_B]) - per_token.mean()) / (
        per_token.std(ddof=1) + 1e-5
    )
    advantages = batch_norm_advantages(tensor(list(rewards_B)), tensor(list(lengths_B)))
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-6, atol=1e-6)


@given(rewards, st.integers(1, 5))
def test_group_relative_advantages_equal_brute_force(values: list[float], size: int) -> None:
    groups = [index // size for index in range(len(values))]
    for group in set(groups):
        members = np.array([v for v, g in zip(values, groups, strict=True) if g == group])
        at = [index for index, g in enumerate(groups) if g == group]
        centered = members - members.mean()
        spread = members.std(ddof=1) if len(members) > 1 else 0.0
        others = [
            m - (members.sum() - m) / (len(members) - 1) if len(members) > 1 else 0.0
            for m in members
        ]
        arguments = (tensor(values), torch.tensor(groups))
        for function, expected in (
            (dr_grpo_advantages, centered),
            (grpo_advantages, centered / (spread + 1e-6)),
            (rloo_advantages, others),
        ):
            np.testing.assert_allclose(
                function(*arguments)[at].numpy(), expected, rtol=1e-6, atol=1e-8
            )


def test_baseline_of_the_group_and_scale_of_the_batch() -> None:
    """Centred 0.5, -0.5, 0, 0, of unbiased deviation sqrt(0.5 / 3)."""
    advantages = reinforce_baseline_advantages(tensor([1, 0, 1, 1]), torch.tensor([4, 4, 7, 7]))
    assert advantages.tolist() == pytest.approx([1.2247449, -1.2247449, 0.0, 0.0], abs=1e-6)


def test_overlong_completions_lose_reward_by_a_line() -> None:
    penalties = overlong_penalties(tensor([50, 80, 90, 100, 120]), first=80, last=100)
    assert penalties.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    rows = AdvantageInputs(
        rewards_B=tensor([1, 1]),
        num_trained_B=tensor([90, 10]),
        groups_B=torch.tensor([0, 0]),
        num_tokens_B=tensor([90, 10]),
    )
    assert PPO(overlong_tokens=(80, 100)).advantages(rows) == [-0.25, 0.25]
    assert PPO().advantages(rows) == [0.0, 0.0]


def with_divergence() -> AdvantageInputs:
    """Completions of 3, 2 and 1 tokens, of which the first and the last of the first is context."""
    trained = [np.array([False, True, False]), np.array([True, True]), np.array([True])]
    return AdvantageInputs(
        rewards_B=tensor([1, 0, 2]),
        num_trained_B=tensor([1, 2, 1]),
        groups_B=torch.tensor([0, 0, 1]),
        num_tokens_B=tensor([3, 2, 1]),
        trained=trained,
        kl_N=tensor([0.3, -0.2, 0.6, 0.1]),
    )


IN_REWARD: dict[str, Any] = {"kl_coefficient": 0.5, "kl_estimator": "k1", "kl_in": "reward"}


def test_divergence_is_in_the_returns_that_the_batch_normalises() -> None:
    """REINFORCE++, eqs. 8 to 10: token t has r - beta sum_{s >= t} K_s; context has none."""
    returns = np.array([1 - 0.15, 0 - 0.5 * (-0.2 + 0.6), 0 - 0.3, 2 - 0.05])
    expected = (returns - returns.mean()) / (returns.std(ddof=1) + 1e-6)
    advantages = ReinforcePlusPlus(advantage="batch_norm", **IN_REWARD).advantages(
        with_divergence()
    )
    assert [np.shape(each) for each in advantages] == [(3,), (2,), (1,)]
    np.testing.assert_allclose(advantages[0], [0.0, expected[0], 0.0])
    np.testing.assert_allclose(np.concatenate(advantages[1:]), expected[1:])


def test_divergence_is_in_the_return_of_a_completion_that_its_group_compares() -> None:
    returns = [1 - 0.15, 0 - 0.5 * 0.4, 2 - 0.05]
    centre = (returns[0] + returns[1]) / 2
    for name, scale in (("dr_grpo", 1.0), ("rloo", 2.0)):
        advantages = PPO(advantage=name, **IN_REWARD).advantages(with_divergence())
        expected = [scale * (returns[0] - centre), scale * (returns[1] - centre), 0.0]
        assert advantages == pytest.approx(expected)


@pytest.mark.parametrize("rule", ["batch_norm", "grpo"])
def test_advantages_are_not_computed_without_the_divergence_in_their_rewards(rule: Any) -> None:
    """A page about a trajectory has the batch but no policy."""
    with pytest.raises(AssertionError, match="a training step computes it"):
        PPO(advantage=rule, **IN_REWARD).advantages(replace(with_divergence(), kl_N=None))


def test_divergence_alone_is_the_advantage_where_rewards_train_nothing() -> None:
    algorithm = PPO(advantage="none", reference="teacher", **IN_REWARD)
    advantages = np.concatenate(algorithm.advantages(with_divergence()))
    np.testing.assert_allclose(advantages, [0.0, -0.15, 0.0, -0.2, -0.3, -0.05])


def slow_gae(
    rewards: list[float], values: list[float], *, discount: float, gae_lambda: float
) -> list[float]:
    """Return equation 16 literally: sum over k of (g l)^k times the k-th difference from t."""
    after = [*values, 0.0][1:]
    deltas = [r + discount * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [
        sum((discount * gae_lambda) ** k * delta for k, delta in enumerate(deltas[at:]))
        for at in range(len(deltas))
    ]


@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0)])
def test_gae_equals_brute_force_over_several_blocks(discount: float, gae_lambda: float) -> None:
    lengths = torch.tensor([1, 0, GAE_BLOCK, GAE_BLOCK + 1, 2 * GAE_BLOCK + 5, 3])
    drawn = torch.randn(2, 6, 2 * GAE_BLOCK + 5, generator=torch.Generator().manual_seed(0))
    rewards_BT, values_BT = drawn.double()
    beyond = torch.arange(drawn.shape[2]) >= lengths[:, None]
    rewards_BT[beyond] = values_BT[beyond] = torch.nan  # nobody may look at it
    advantages = gae(rewards_BT, values_BT, lengths, discount=discount, gae_lambda=gae_lambda)
    for row, length in enumerate(lengths.tolist()):
        parts = rewards_BT[row, :length].tolist(), values_BT[row, :length].tolist()
        expected = slow_gae(*parts, discount=discount, gae_lambda=gae_lambda)
        assert advantages[row, :length].tolist() == pytest.approx(expected, abs=1e-9)
        assert not advantages[row, length:].any()


def test_two_trajectories_have_the_deviation_of_one_degree_of_freedom() -> None:
    advantages = reinforce_baseline_advantages(tensor([1, 0]), torch.tensor([0, 0]))
    assert advantages.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-7)


def test_length_penalty_needs_a_line() -> None:
    with pytest.raises(ValueError, match="the larger last"):
        PPO(overlong_tokens=(100, 100))
