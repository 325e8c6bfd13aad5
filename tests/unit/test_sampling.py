"""Tokens drawn from logits by inverting the cumulative distribution, in two steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areal_flow.generation.sampling import sample
from areal_flow.types import Sampling


def random_logits(num_rows: int, vocabulary: int, *, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocabulary)
    return torch.randn(num_rows, vocabulary, generator=generator) * scale


@pytest.mark.parametrize("vocabulary", [1, 13, 128, 129, 1000])
def test_token_is_where_the_exact_cumulative_distribution_passes_the_number(
    vocabulary: int,
) -> None:
    logits_SV = random_logits(400, vocabulary, scale=2)
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
        _, logprobs_S = sample(logits_SV, uniforms_S, Sampling(1, top_k=top_k))
        assert torch.isfinite(logprobs_S).all()
