"""Completions of one prompt share its tokens in a row: the same numbers, computed once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_flow.policy.models import packed_layout
from areal_flow.policy.models.attention import AttentionRule
from areal_flow.policy.models.packed_layout import PackedLayout, Unfolding
from areal_flow.training.head import token_logprobs
from areal_flow.training.sequences import TrainingSequence, group_by_prompt, pack_sequences
from tests.policies import small_policy

VOCABULARY = 13


def sequence(prompt: list[int], num_output: int, seed: int = 0) -> TrainingSequence:
    output = np.random.default_rng([seed, num_output]).integers(0, VOCABULARY, num_output)
    return TrainingSequence(
        np.array(prompt),
        output,
        np.zeros(num_output, np.float32),
        np.ones(num_output, np.bool_),
        1.0,
        0,
    )


def logprobs_and_gradients(
    policy: Any, rows: list[list[TrainingSequence]]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the sum over the sequences of some rows, each token with its own weight."""
    policy.zero_grad()
    results = []
    for row in rows:
        logprobs_M = token_logprobs(policy, pack_sequences(row), temperature=1.0)
        weights_M = torch.cat([torch.arange(1.0, 1 + len(s.output_tokens)) for s in row])
        (logprobs_M * weights_M).sum().backward()  # type: ignore[no-untyped-call]
        results.append(logprobs_M.detach())
    return torch.cat(results), [p.grad.clone() for p in policy.parameters() if p.grad is not None]


def test_golden_row_of_a_prompt_that_two_completions_share() -> None:
    first, other, third = sequence([1, 2], 3), sequence([5], 1), sequence([1, 2], 2)
    other = replace(other, output_tokens=np.array([9]))
    first = replace(first, output_tokens=np.array([3, 4, 5]), trained=np.array([True, False, True]))
    third = replace(third, output_tokens=np.array([6, 7]))
    micro = pack_sequences([first, other, third])
    assert micro.input_ids_1T.tolist() == [[1, 2, 3, 4, 5, 5, 9, 6, 7, *[0] * 55]]
    assert micro.layout.position_ids.tolist() == [
        [0, 1, 2, 3, 4, 0, 1, 2, 3, *[0, 1, 2, 3, 4] * 11]
    ]
    assert micro.predicting_M.tolist() == [1, 3, 5, 1, 7]
    assert micro.trained_M.tolist() == [2, 4, 6, 7, 8]
    assert micro.targets_M.tolist() == [3, 5, 9, 6, 7]
    assert micro.sequence_M.tolist() == [0, 0, 1, 2, 2]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=2, max_size=9),
    st.sampled_from([0, 2**20]),
)
@settings(deadline=None, max_examples=30)
def test_values_and_gradients_equal_those_of_single_sequences(
    drawn: list[tuple[int, int]], free_scores: int
) -> None:
    prompts = [[1, 2, 3], [4] * 20, [7]]
    sequences = [sequence(prompts[which], num, seed) for seed, (which, num) in enumerate(drawn)]
    policy = small_policy().double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_layout, "FREE_SCORES", free_scores)
        shared, gradients = logprobs_and_gradients(policy, [sequences])
    alone, expected = logprobs_and_gradients(policy, [[each] for each in sequences])
    torch.testing.assert_close(shared, alone, rtol=1e-5, atol=1e-5)  # the head is float32
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        assert (gradient - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()


def test_gradient_of_unfolding_is_that_of_finite_differences() -> None:
    places = [np.array([0, 1, 2]), np.array([0, 1, 3, 4]), np.array([5])]
    unfolding = Unfolding(places, free_scores=99)
    packed = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    real = [torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.float64)]

    def unfolded(packed: torch.Tensor) -> list[torch.Tensor]:
        """Return the tokens that attention reads, without padding."""
        rows = unfolding.rows_of(packed)
        return [row * real_NL[:, None, :, None] for row, real_NL in zip(rows, real, strict=True)]

    assert torch.autograd.gradcheck(lambda packed: tuple(unfolded(packed)), packed)


def test_a_shared_prompt_is_computed_once() -> None:
    together = [sequence([1] * 88, 5, seed) for seed in range(8)]
    assert pack_sequences(together).input_ids_1T.shape[1] == 88 + 8 * 5


def test_one_sequence_alone_is_not_unfolded() -> None:
    layout = PackedLayout([7])
    drawn = torch.randn(3, 1, 2, 7, 4)
    layout.attend(0, *drawn, AttentionRule(scale=0.5))
    assert not layout._unfoldings


def test_passes_in_bfloat16_attend_in_float32_on_a_cpu() -> None:
    """With less padding: a thousandth of the limit for rows of one head in float32."""
    lengths, rule = [200, 5, 195, 60], AttentionRule(scale=0.25)
    layout = PackedLayout(lengths)
    drawn = [torch.randn(1, heads, sum(lengths), 16) for heads in (256, 2, 2)]
    halves = [each.bfloat16().requires_grad_() for each in drawn]
    with torch.autocast("cpu", torch.bfloat16):
        output = layout.attend(0, *halves, rule)
    output.float().square().sum().backward()  # type: ignore[no-untyped-call]
    ((free_scores, unfolding),) = layout._unfoldings.items()
    assert (free_scores, unfolding.shapes) == (2**10, [(2, 200), (1, 60), (1, 5)])
    wide = [each.detach().float().requires_grad_() for each in halves]
    exact = unfolding.attend(*(each[0].transpose(0, 1) for each in wide), rule)[None]
    assert torch.equal(output, exact.bfloat16())
    exact.square().sum().backward()  # type: ignore[no-untyped-call]
    for half, full in zip(halves, wide, strict=True):
        assert half.grad is not None
        assert full.grad is not None
        assert (half.grad - full.grad).norm() <= 5e-3 * full.grad.norm()


def test_companions_stay_together_as_far_as_a_micro_batch_holds() -> None:
    sequences = [sequence([n % 3] * 10, 10) for n in range(12)]
    units = group_by_prompt(sequences, range(12), 1, max_tokens=50)
    assert sorted(m for unit in units for m in unit) == [*range(12)]
    assert sorted(map(len, units)) == [2, 2, 2, 2, 2, 2]
    assert all(len({m % 3 for m in unit}) == 1 for unit in units)


def test_sequences_of_short_prompts_are_packed_one_by_one() -> None:
    sequences = [sequence([1], 30) for _ in range(12)]
    assert group_by_prompt(sequences, range(12), 1, max_tokens=400) == [[n] for n in range(12)]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_get_parts_of_a_single_group(num_ranks: int) -> None:
    sequences = [sequence([1] * 10, 10, seed) for seed in range(32)]
    units = group_by_prompt(sequences, range(32), num_ranks, max_tokens=1000)
    assert len(units) >= 4 * num_ranks
    assert all(len(unit) > 1 for unit in units)


@pytest.mark.slow
def test_gradients_of_shared_prompts_have_the_same_bits_by_two_threads() -> None:
    """A prompt's last token predicts the first of each completion: it has all of their gradients.

    Here by four thousand completions of one token, of which each thread has some.
    """
    policy = small_policy()
    row = [[sequence([1, 2, 3], 1, seed) for seed in range(4096)]]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        _, first = logprobs_and_gradients(policy, row)
        kept = [gradient.clone() for gradient in first]
        for _ in range(5):
            _, again = logprobs_and_gradients(policy, row)
            assert all(map(torch.equal, again, kept))
    finally:
        torch.set_num_threads(before)
