"""Tokens drawn from logits by inverting the cumulative distribution, in two steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areal_flow.core.types import Sampling, as_tokens
from areal_flow.rollout.engines.sampling import adjust_logits, processed_logprobs, sample


def random_logits(num_rows: int, vocabulary: int, *, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocabulary)
    return torch.randn(num_rows, vocabulary, generator=generator) * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 13, 128, 129, 1000])
def test_token_is_where_the_exact_cumulative_distribution_passes_the_number(
    vocabulary: int, dtype: torch.dtype
) -> None:
    logits_SV = random_logits(400, vocabulary, scale=2).to(dtype)
    numbers_S = np.random.default_rng(0).random(400)
    tokens_S, logprobs_S = sample(logits_SV, torch.from_numpy(numbers_S), Sampling(1))
    exact_SV = logits_SV.double().softmax(1).numpy()
    for token, logprob, number, exact_V in zip(
        tokens_S.tolist(), logprobs_S.tolist(), numbers_S, exact_SV, strict=True
    ):
        upto_V = exact_V.cumsum()
        assert upto_V[token] - exact_V[token] - 1e-6 <= number * upto_V[-1] <= upto_V[token] + 1e-6
        assert logprob == pytest.approx(np.log(exact_V[token]), abs=1e-5)


def test_number_just_below_one_draws_no_token_without_probability() -> None:
    logits_SV = random_logits(64, 300, scale=30)
    uniforms_S = torch.full((64,), 1 - 2.0**-53, dtype=torch.float64)
    for top_k in (0, 1, 7):
        for of_type_SV in (logits_SV, logits_SV.bfloat16()):
            _, logprobs_S = sample(of_type_SV, uniforms_S, Sampling(1, top_k=top_k))
            assert torch.isfinite(logprobs_S).all()


LOGITS_1V = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
"""Probabilities .6439, .2369, .0871, .0321."""


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, [0.6439, 0.2369, 0.0871, 0.0321]),
        ({"temperature": 2.0}, [0.4551, 0.2760, 0.1674, 0.1015]),
        ({"min_p": 0.3}, [0.7311, 0.2689, 0, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0]),
        ({"temperature": 2.0, "min_p": 0.3}, [0.5065, 0.3072, 0.1863, 0]),
        ({"top_k": 3}, [0.6652, 0.2447, 0.0900, 0]),
        ({"top_p": 0.7}, [0.7311, 0.2689, 0, 0]),
        # The likeliest has .64 of all, and .73 of the two that min-p or top-k leave.
        ({"top_p": 0.7, "min_p": 0.3}, [1, 0, 0, 0]),
        ({"top_p": 0.7, "top_k": 2}, [1, 0, 0, 0]),
    ],
)
def test_processed_probabilities_in_numbers(
    sampling: dict[str, float], expected: list[float]
) -> None:
    """min-p, top-k, top-p in this order, after temperature, renormalised each time."""
    probabilities_1V = processed_logprobs(LOGITS_1V, Sampling(1, **sampling)).exp()  # type: ignore[arg-type]
    assert probabilities_1V[0].tolist() == pytest.approx(expected, abs=1e-4)


def test_repetition_penalty_and_early_stops_in_numbers() -> None:
    """Positive logits are divided, negative ones multiplied, once however often a token occurred;
    a row that has its minimum of tokens may stop."""
    sampling = Sampling(9, repetition_penalty=2.0, min_new_tokens=2, stop_token_ids=(1,))
    prompts = [as_tokens([0, 0]), as_tokens([1, 2])]
    own = [as_tokens([3]), as_tokens([2, 2])]
    adjusted_SV = adjust_logits(LOGITS_1V.expand(2, -1), sampling, prompts, own)
    assert adjusted_SV.tolist() == [[1, float("-inf"), 0, -2], [2, 0.5, 0, -1]]
    assert LOGITS_1V.tolist() == [[2, 1, 0, -1]]
