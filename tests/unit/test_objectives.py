"""Objectives, corrections and what is added to a loss: golden numbers and invariances."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from math import exp, inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_flow.algorithms.composed import (
    corrected_weights,
    kl_from_older,
    proximal_logprobs,
)
from areal_flow.algorithms.logprobs import KLEstimator, kl_to_reference, suffix_sums
from areal_flow.algorithms.protocol import (
    LossInputs,
    MinibatchSize,
    PolicyLoss,
    effective_sample_fraction,
)
from areal_flow.algorithms.registry import (
    ALGORITHMS,
    CISPO,
    DPPO,
    GSPO,
    M2PO,
    PPO,
    SAPO,
    ActorCriticPPO,
    DecoupledPPO,
)
from areal_flow.config import build_recipe
from areal_flow.core.errors import ConfigError
from areal_flow.training.inspection import completion_logprobs
from areal_flow.training.settings import StepSettings
from areal_flow.training.step import train_step
from tests.policies import small_policy
from tests.unit.test_losses import inputs
from tests.unit.test_trainer import make_sequences, state

RATIOS = [exp(0.5), exp(-0.1), exp(1.5)]
"""Of `inputs()` to the behaviour policy; the advantages are 1, -1 and 2."""


def gradient(algorithm: Any, inputs: LossInputs) -> list[float]:
    algorithm.loss(inputs).losses_T.sum().backward()
    gradients: list[float] = inputs.logprobs_T.grad.tolist()
    return gradients


def finite_differences(loss: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> Any:
    steps = 1e-6 * torch.eye(len(at), dtype=at.dtype)
    return torch.stack([(loss(at + d) - loss(at - d)) / 2e-6 for d in steps])


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    """Weights 1.28, 0.9048 and 1.28, times advantage and log-probability."""
    given_ = inputs()
    loss = CISPO().loss(given_)
    assert loss.losses_T.tolist() == pytest.approx([1.28, -0.452419, 5.12], abs=1e-6)
    assert loss.metrics["clip_high_fraction"].value == pytest.approx(2 / 3)
    assert gradient(CISPO(), given_) == pytest.approx([-1.28, 0.904837, -2.56], abs=1e-6)
    floored = CISPO(epsilon_low=0.05).loss(inputs())
    assert floored.losses_T.tolist() == pytest.approx([1.28, -0.475, 5.12])
    assert floored.metrics["clip_low_fraction"].value == pytest.approx(1 / 3)
    assert not floored.clipped_T.any()


def test_sapo_fades_the_gradient_by_a_sigmoid() -> None:
    """J = (4 / tau) sigmoid(tau (r - 1)) A: 2.626889, -1.809678 and 7.761298."""
    given_ = inputs()
    loss = SAPO().loss(given_)
    assert loss.losses_T.tolist() == pytest.approx([-2.626889, 1.809678, -7.761298], abs=1e-6)
    gates = [(1.0, RATIOS[0]), (1.05, RATIOS[1]), (1.0, RATIOS[2])]
    p = [1 / (1 + exp(-tau * (ratio - 1))) for tau, ratio in gates]
    expected = [
        -4 * q * (1 - q) * ratio * advantage
        for q, ratio, advantage in zip(p, RATIOS, (1, -1, 2), strict=True)
    ]
    assert gradient(SAPO(), given_) == pytest.approx(expected)
    assert not loss.clipped_T.any()


def test_dppo_masks_by_probability_and_not_by_ratio() -> None:
    """Probabilities moved by 0.1447, -0.0638 and 0.1051."""
    given_ = inputs()
    loss = DPPO(max_divergence=0.12).loss(given_)
    assert loss.losses_T.tolist() == pytest.approx([0.0, RATIOS[1], -2 * RATIOS[2]])
    assert loss.clipped_T.tolist() == [True, False, False]
    back = DPPO(max_divergence=0.05).loss(inputs(advantages=[-1.0, -1.0, -2.0]))
    assert back.clipped_T.tolist() == [False, True, False], "to the advantage's side only"
    assert back.metrics["clip_low_fraction"].value == pytest.approx(1 / 3)


def test_m2po_leaves_out_the_largest_until_the_mean_square_is_small_enough() -> None:
    """Squares 0.25, 0.01 and 2.25, all to their advantage's side: means 0.8367, 0.13, 0.01."""
    masks = {
        limit: M2PO(max_second_moment=limit).loss(inputs()).clipped_T.tolist()
        for limit in (1.0, 0.5, 0.04, 0.001)
    }
    assert masks == {
        1.0: [False, False, False],
        0.5: [False, False, True],
        0.04: [True, False, True],
        0.001: [True, True, True],
    }
    inward = M2PO().loss(inputs(advantages=[-1.0, 1.0, -2.0]))
    assert not inward.clipped_T.any()
    assert inward.losses_T.tolist() == pytest.approx([RATIOS[0], -RATIOS[1], 2 * RATIOS[2]])


@given(st.lists(st.tuples(st.floats(-3, 3), st.sampled_from([-1.0, 1.0])), max_size=20))
def test_m2po_bound_masks_what_the_papers_loop_masks(tokens: list[tuple[float, float]]) -> None:
    outward = [x for x, a in tokens if x * a > 0 and abs(x) > 1e-9]
    tokens = [(x, a) for x, a in tokens if abs(x) > 1e-9]
    kept = sorted(abs(x) for x in outward)
    if len(set(kept)) < len(kept):
        return  # of equal ones the loop leaves out any
    while kept and sum(x * x for x in kept) / len(kept) > 0.04:
        kept.pop()
    columns = torch.tensor(tokens, dtype=torch.float64).reshape(-1, 2).T
    bound = M2PO().minibatch_bound(columns[0], columns[1])
    assert sorted(abs(x) for x in outward if abs(x) < bound) == kept
    assert (bound == inf) == (len(kept) == len(outward))


def test_m2po_bounds_what_the_loss_trains_where_a_divergence_is_in_the_advantages() -> None:
    algorithm = M2PO(
        num_minibatches=1,
        kl_coefficient=1.0,
        kl_estimator="k1",
        kl_in="advantage",
        max_second_moment=1.0,
    )
    micro_batches, masks = list[LossInputs](), list[torch.Tensor]()

    def loss(inputs: LossInputs) -> PolicyLoss:
        loss = algorithm.loss(inputs)
        assert loss.clipped_T is not None
        micro_batches.append(inputs)
        masks.append(loss.clipped_T)
        return loss

    backend = state(tokens_per_micro_batch=32)
    backend.hold_reference(small_policy(seed=2))
    how = StepSettings(algorithm, temperature=1.0, seed=0, loss=loss)
    train_step(backend, make_sequences(), step=1, settings=how)
    assert len(micro_batches) > 1
    columns = [
        torch.cat([getattr(micro, f"{name}_T").detach() for micro in micro_batches])
        for name in ("logprobs", "behavior_logprobs", "reference_logprobs", "advantages")
    ]
    logprobs, behavior, reference, advantages = columns
    log_ratio, trained_advantages = logprobs - behavior, advantages - (behavior - reference)
    outward, kept = log_ratio * trained_advantages > 0, ~torch.cat(masks)
    assert log_ratio[outward & kept].square().mean() <= 1.0
    bound = algorithm.minibatch_bound(log_ratio, trained_advantages)
    assert (kept == ~(outward & (log_ratio.abs() >= bound))).all()
    assert bound != algorithm.minibatch_bound(log_ratio, advantages)


def test_dual_clip_ends_the_pull_of_a_likely_token_of_negative_advantage() -> None:
    """Ratio e^1.5 = 4.4817 and advantage -2: -8.9634 without, -6 with a dual clip of 3."""
    given_ = inputs(advantages=[1.0, -1.0, -2.0])
    assert PPO().loss(given_).losses_T.tolist()[2] == pytest.approx(2 * RATIOS[2])
    loss = PPO(dual_clip=3.0).loss(given_)
    assert loss.losses_T.tolist() == pytest.approx([-1.2, RATIOS[1], 6.0])
    assert loss.clipped_T.tolist() == [True, False, True]
    assert gradient(PPO(dual_clip=3.0), given_) == pytest.approx([0.0, RATIOS[1], 0.0])


WEIGHTS = [1.4918247, 0.7408182, 6.6858944]
"""Of `inputs()`: the policy before the step over the one that sampled."""


@pytest.mark.parametrize(
    ("rule", "floor", "cap", "expected"),
    [
        ("full", None, 5.0, WEIGHTS),
        ("truncate", None, 1.2, [1.2, WEIGHTS[1], 1.2]),
        ("mask", None, 5.0, [*WEIGHTS[:2], 0.0]),
        ("mask", 0.8, 5.0, [WEIGHTS[0], 0.0, 0.0]),
        ("mask_sequence", None, 1.06, [*WEIGHTS[:2], 0.0]),
        ("mask_sequence", None, 1.05, [0.0, 0.0, 0.0]),
        ("mask_sequence", 0.5, 7.0, WEIGHTS),
    ],
)
def test_rules_keep_truncate_and_mask_importance_weights(
    rule: Any, floor: float | None, cap: float, expected: list[float]
) -> None:
    """The first two tokens are a sequence, of geometric mean e^0.05 = 1.0513."""
    given_ = inputs(sequence=[0, 0, 1])
    log_weight = given_.proximal_logprobs_T - given_.behavior_logprobs_T
    weights = corrected_weights(log_weight, given_, rule=rule, floor=floor, cap=cap)
    assert weights.tolist() == pytest.approx(expected)


def test_masked_weights_are_counted_and_leave_the_divisor() -> None:
    algorithm = DecoupledPPO(importance_weight_rule="mask", importance_weight_floor=0.8)
    loss = algorithm.loss(inputs())
    assert loss.losses_T.tolist()[1:] == [0.0, 0.0]
    assert loss.metrics["importance_weight_masked_fraction"].value == pytest.approx(2 / 3)
    assert loss.metrics["importance_weight_max"].value == pytest.approx(WEIGHTS[2])
    size = MinibatchSize(num_tokens=3, num_sequences=1)
    total = algorithm.aggregate(loss.losses_T, torch.tensor([0, 0, 0]), size, num_sequences=1)
    assert total.item() == pytest.approx(loss.losses_T[0].item() / 3)


def test_proximal_policy_is_recomputed_taken_or_interpolated() -> None:
    """Behaviour -1.5, -0.4, -3.5 and policy -1, -0.5, -2, tokens 0, 1 and 3 versions old."""
    given_ = replace(inputs(), versions_T=torch.tensor([7, 6, 4]), policy_version=7)
    assert proximal_logprobs(given_, "recomputed").tolist() == [-1.1, -0.7, -1.6]
    assert proximal_logprobs(given_, "behavior").tolist() == [-1.5, -0.4, -3.5]
    logprobs = proximal_logprobs(given_, "interpolated")
    assert logprobs.tolist() == pytest.approx([-1.5, -0.45, -2.375])
    assert not logprobs.requires_grad


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.4), ("k2", 0.08), ("k3", 0.0703200)])
def test_divergence_estimates(estimator: KLEstimator, expected: float) -> None:
    divergence = kl_to_reference(torch.tensor([-1.0]), torch.tensor([-1.4]), estimator)
    assert float(divergence) == pytest.approx(expected, abs=1e-6)


@given(st.lists(st.floats(0.05, 1.0), min_size=2, max_size=6), st.integers(0, 100))
def test_divergence_estimates_have_the_mean_of_the_divergence(
    shares: list[float], seed: int
) -> None:
    """Over all tokens by their probability, against the sum p log p / q in float64."""
    other = torch.rand(len(shares), generator=torch.Generator().manual_seed(seed)) + 0.05
    new = (torch.tensor(shares, dtype=torch.float64) / sum(shares)).log()
    old = other.double().log() - other.double().sum().log()
    exact = float((new.exp() * (new - old)).sum())
    for estimator in ("k1", "k3"):
        mean = (new.exp() * kl_to_reference(new, old, estimator)).sum()
        assert float(mean) == pytest.approx(exact, abs=1e-9)
    older = (old.exp() * kl_from_older(new - old)).sum()
    assert float(older) == pytest.approx(exact, abs=1e-9)


def with_reference(**columns: Any) -> LossInputs:
    reference = torch.tensor([-1.3, -0.5, -1.8], dtype=torch.float64)
    return replace(inputs(**columns), reference_logprobs_T=reference)


def test_divergence_from_the_reference_is_punished_in_the_loss() -> None:
    bare = PPO().loss(inputs()).losses_T
    loss = PPO(kl_coefficient=0.5, kl_estimator="k2").loss(with_reference())
    assert (loss.losses_T - bare).tolist() == pytest.approx([0.5 * 0.045, 0.0, 0.5 * 0.02])
    assert loss.metrics["kl_policy_reference"].value == pytest.approx(0.065 / 3)


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=5), min_size=1, max_size=5))
def test_sums_to_come_end_with_their_sequence(sequences: list[list[float]]) -> None:
    flat = torch.tensor([x for s in sequences for x in s], dtype=torch.float64)
    owners = torch.tensor([i for i, s in enumerate(sequences) for _ in s])
    expected = [sum(s[at:]) for s in sequences for at in range(len(s))]
    assert suffix_sums(flat, owners, len(sequences)).tolist() == pytest.approx(expected, abs=1e-9)


def test_effective_sample_fraction_is_of_all_parts_together() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0, 0.0])
    total = effective_sample_fraction(weights)
    assert total.value == pytest.approx(36 / (4 * 14))
    parts = [effective_sample_fraction(part) for part in weights.split([1, 3])]
    assert parts[0].add(parts[1]) == total
    assert effective_sample_fraction(torch.ones(5)).value == 1
    assert effective_sample_fraction(torch.zeros(0)).value == 0


ENDING: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in ALGORITHMS},
    "dual clip": {"name": "ppo", "dual_clip": 1.5},
    "floor of cispo": {"name": "cispo", "epsilon_low": 0.2},
    "interpolated": {"proximal": "interpolated"},
    "masked": {"importance_weight_rule": "mask", "importance_weight_cap": 1.5},
    "masked gspo": {
        "name": "gspo",
        "proximal": "recomputed",
        "importance_weight_rule": "mask",
        "importance_weight_floor": 0.5,
        "importance_weight_cap": 1.5,
    },
}
columns_of_tokens = st.tuples(*[st.floats(-2, 0)] * 3, st.sampled_from([-2.0, -0.5, 0.5, 2.0]))


@pytest.mark.parametrize("variant", ENDING)
@settings(max_examples=40, deadline=None)
@given(tokens=st.lists(columns_of_tokens, min_size=2, max_size=8))
def test_gradient_is_reported_as_ended_where_there_is_none(
    variant: str, tokens: list[tuple[float, ...]]
) -> None:
    """Also if tokens of a sequence have different advantages."""
    algorithm = build_recipe({"algorithm": ENDING[variant]}, source="").algorithm
    owners = [at // 3 for at in range(len(tokens))]
    given_ = inputs(*(list(column) for column in zip(*tokens, strict=True)), owners)
    clipped = algorithm.loss(given_).clipped_T.tolist()
    assert clipped == [each == 0 for each in gradient(algorithm, given_)]


@pytest.mark.parametrize("name", ["ppo", "sapo", "dppo", "m2po", "cispo"])
def test_gradient_of_a_ratio_beyond_all_bounds_is_reported_as_ended(name: str) -> None:
    algorithm = build_recipe({"algorithm": {"name": name}}, source="").algorithm
    given_ = inputs([0.0, -1.0], [-30.0, -1.1], [-30.0, -1.1], [-1.0, -1.0])
    clipped = algorithm.loss(given_).clipped_T.tolist()
    assert clipped == [each == 0 for each in gradient(algorithm, given_)]
    assert clipped[0] == (name != "cispo")


def test_gspo_keeps_the_gradients_of_tokens_apart() -> None:
    """Of a token masked by its weight, or clipped, beside one that is trained."""
    algorithm = GSPO(
        epsilon=0.01,
        epsilon_high=0.01,
        proximal="recomputed",
        importance_weight_rule="mask",
        importance_weight_cap=5.0,
    )
    given_ = inputs([-1.0, -0.5, -1.4], advantages=[1.0, -1.0, 2.0])
    s = exp((0.1 + 0.2 + 0.2) / 3)
    loss = algorithm.loss(given_)
    assert loss.losses_T.tolist() == pytest.approx([-1.01 * WEIGHTS[0], s * WEIGHTS[1], 0.0])
    assert gradient(algorithm, given_) == pytest.approx([0.0, s * WEIGHTS[1], 0.0])


def test_gspo_has_no_gradient_where_a_ratio_is_bounded() -> None:
    """As all ratios: one of e^100 and a negative advantage would pull by 4.9e8."""
    given_ = inputs([-1.0], [-1.0], [-101.0], [-1.0])
    assert gradient(GSPO(), given_) == [0.0]


def test_gspo_has_the_gradient_of_its_sequences_ratio() -> None:
    """Of eq. 5, by finite differences, where the tokens of a sequence have one advantage."""
    generator = torch.Generator().manual_seed(3)
    start, old = -torch.rand(2, 24, dtype=torch.float64, generator=generator)
    owners = torch.arange(6).repeat_interleave(4)
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0, 2.0, -0.3], dtype=torch.float64)
    low, high = 0.02, 0.03

    def written_out(logprobs: torch.Tensor) -> torch.Tensor:
        ratios = (logprobs - old).view(6, 4).mean(dim=1).exp()
        clipped = ratios.clamp(1 - low, 1 + high)
        return -torch.minimum(ratios * advantages, clipped * advantages).mean()

    algorithm = GSPO(epsilon=low, epsilon_high=high)
    given_ = LossInputs(
        start.clone().requires_grad_(), old, old, advantages[owners], owners, owners, 6
    )
    policy_loss = algorithm.loss(given_)
    loss = algorithm.aggregate(policy_loss.losses_T, owners, MinibatchSize(24, 6), num_sequences=6)
    loss.backward()
    assert 0 < policy_loss.metrics["clip_fraction"].value < 1
    assert float(loss.detach()) == pytest.approx(float(written_out(start)), abs=1e-12)
    numeric = finite_differences(written_out, start)
    torch.testing.assert_close(given_.logprobs_T.grad, numeric, rtol=1e-6, atol=1e-8)


DIFFERENTIABLE = [name for name in ALGORITHMS if name not in ("cispo", "gspo")]
"""By definition the gradients of CISPO and GSPO-token are not those of their losses."""


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    columns = torch.rand(4, 24, dtype=torch.float64, generator=generator)
    owners = torch.arange(6).repeat_interleave(4)
    start = -columns[0]
    rest = (start - 0.3 * (columns[1] - 0.5), start - 0.3 * (columns[2] - 0.5))
    algorithm = ALGORITHMS[name]()

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        given_ = LossInputs(logprobs, *rest, columns[3] - 0.5, owners, owners, 6)
        return algorithm.loss(given_).losses_T.sum()

    at = start.clone().requires_grad_()
    loss(at).backward()
    torch.testing.assert_close(at.grad, finite_differences(loss, start), rtol=1e-6, atol=1e-7)


sequences = st.lists(
    st.lists(st.tuples(*[st.floats(-3, 0)] * 3), min_size=1, max_size=4), min_size=2, max_size=6
)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), rows=sequences)
def test_loss_of_every_algorithm_is_that_of_its_parts_in_any_order(
    name: str, aggregation: str, data: st.DataObject, rows: list[list[Any]]
) -> None:
    """However sequences are ordered and dealt to micro-batches and ranks."""
    constant = {"aggregation_tokens": 8} if aggregation == "constant" else {}
    algorithm = ALGORITHMS[name](aggregation=aggregation, **constant)
    size = MinibatchSize(sum(map(len, rows)), len(rows))
    numbered = list(enumerate(rows))
    full = batch(numbered)
    log_ratio = full.logprobs_T - full.behavior_logprobs_T
    bound = None
    if algorithm.needs_minibatch_bound:
        bound = algorithm.minibatch_bound(log_ratio, full.advantages_T)
    shuffled = data.draw(st.permutations(numbered))
    cut = data.draw(st.integers(1, len(rows) - 1))

    def loss(part: LossInputs) -> float:
        losses_T, num_sequences = algorithm.loss(part).losses_T, part.num_sequences
        return float(
            algorithm.aggregate(losses_T, part.sequence_T, size, num_sequences=num_sequences)
        )

    parts = (batch(shuffled[:cut]), batch(shuffled[cut:]))
    total = sum(loss(replace(part, minibatch_bound=bound)) for part in parts)
    expected = loss(full)
    assert total == pytest.approx(expected, rel=1e-9, abs=1e-9)


def batch(numbered: list[tuple[int, list[Any]]]) -> LossInputs:
    """Return sequences side by side; the advantage is of the sequence's own number."""
    columns = [[token[at] for _, row in numbered for token in row] for at in range(3)]
    advantages = [(-1.0) ** index * (1 + index) for index, row in numbered for _ in row]
    owners = [at for at, (_, row) in enumerate(numbered) for _ in row]
    given_ = inputs(*columns, advantages, owners)
    return replace(given_, logprobs_T=given_.logprobs_T.detach())


ALONE = {"group_size": 1, "batch_size": 4}
REFUSED: dict[str, dict[str, Any]] = {
    "a group of one teaches nothing": {"controller": ALONE},
    "beyond every sequence": {
        "algorithm": {"overlong_tokens": [9000, 9001]},
        "generation": {"max_model_len": 128},
    },
    "plain PPO": {"algorithm": {"proximal": "interpolated"}, "schedule": "sync"},
    "has nothing to correct": {"algorithm": {"name": "gspo", "importance_weight_rule": "mask"}},
    "is of the rules": {
        "algorithm": {"importance_weight_rule": "truncate", "importance_weight_floor": 0.5}
    },
    "set algorithm.name to 'decoupled_ppo'": {
        "algorithm": {"name": "ppo", "proximal": "recomputed"}
    },
    "set algorithm.name to 'ppo'": {"algorithm": {"proximal": "behavior"}},
    "its ratio is to that one": {"algorithm": {"name": "dppo", "proximal": "recomputed"}},
    "must be above the clip's own end": {"algorithm": {"epsilon": 2.5, "dual_clip": 3.0}},
    "must normalise over the batch": {
        "algorithm": {"name": "reinforce_plus_plus", "advantage": "grpo"}
    },
    "a gradient that is 0 on average": {"algorithm": {"kl_coefficient": 0.1, "kl_estimator": "k1"}},
    "algorithm.reward_scale: there is no such setting": {"algorithm": {"reward_scale": 5.0}},
    "the larger last": {"algorithm": {"overlong_tokens": [20, 10]}},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_combinations_without_sense_are_refused_with_the_reason(reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_recipe(REFUSED[reason], source="")


def test_group_of_one_is_accepted_with_an_advantage_over_the_batch() -> None:
    build_recipe({"controller": ALONE, "algorithm": {"advantage": "batch_norm"}}, source="")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gspo", {"advantage": "grpo", "aggregation": "sequence_mean", "epsilon": 3e-4}),
        ("cispo", {"advantage": "grpo", "aggregation": "token_mean", "epsilon_low": None}),
        ("sapo", {"advantage": "grpo", "aggregation": "sequence_mean"}),
        ("m2po", {"advantage": "grpo", "aggregation": "token_mean", "max_second_moment": 0.04}),
        ("dppo", {"advantage": "dr_grpo", "max_divergence": 0.15, "proximal": "behavior"}),
        ("reinforce_plus_plus", {"advantage": "reinforce_baseline", "epsilon": 0.2}),
    ],
)
def test_name_brings_the_settings_of_its_paper(name: str, expected: dict[str, Any]) -> None:
    algorithm = build_recipe({"algorithm": {"name": name}}, source="").algorithm
    assert {key: getattr(algorithm, key) for key in expected} == expected


PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def test_page_of_algorithms_names_each() -> None:
    assert {name for name in ALGORITHMS if f"| `{name}` |" not in PAGE} == set()


@pytest.mark.parametrize("recipe", re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
def test_recipes_of_the_page_take_a_step(recipe: str) -> None:
    algorithm = build_recipe(tomllib.loads(recipe), source="").algorithm
    backend = state()
    before = backend.fingerprint()
    backend.hold_reference(small_policy(seed=2))
    if isinstance(algorithm, ActorCriticPPO):
        backend.add_critic(algorithm)
    drawn = make_sequences()
    logprobs = completion_logprobs(backend, drawn, temperature=1.0)
    own = [np.array(row, np.float32) for row in logprobs]
    sequences = [replace(s, behavior_logprobs=row) for s, row in zip(drawn, own, strict=True)]
    how = StepSettings(algorithm, temperature=1.0, seed=0)
    numbers = train_step(backend, sequences, step=1, settings=how)
    assert backend.fingerprint() != before
    assert algorithm.advantage == "none" or numbers.metrics["advantage_std"].value > 0
