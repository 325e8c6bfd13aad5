"""Log-probabilities of tokens, entropies, and how far two policies, or two engines, are apart.

Letters: T positions, or trained tokens of a micro-batch, S its sequences; V vocabulary, k likely
tokens, K = k + 1 buckets, G sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp
from typing import TYPE_CHECKING, Literal

import numpy as np

from areal_flow.algorithms.protocol import Metric, mean
from areal_flow.core.types import ENGINE_GAP

if TYPE_CHECKING:
    from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""exp of it is 4.9e8. float32 overflows at 88, and the squares of a gradient's norm at 44."""

CHUNK_NUMBERS = 2**22
"""Logits processed at a time without gradient: 16 MiB of float32."""

NUM_MOMENTS = 8
"""How many of the sums of an engine's gap are not counts of bins."""
BINS_PER_DECADE = 20
"""A percentile is right within a bin, whose ends differ by 12%."""
FIRST_DECADE, LAST_DECADE = -8, 2
NUM_BINS = (LAST_DECADE - FIRST_DECADE) * BINS_PER_DECADE
"""Of |difference|, in powers of ten; the first one has all that is smaller, the last what is
larger."""
PERCENTILE = 0.99


def next_token_logprobs(
    logits_TV: Tensor, targets_T: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """Return log softmax(logits / temperature) of each target, float32, `[T]`.

    `logits_TV[t]` is the distribution of the token *after* position t, so the caller pairs it with
    the token at t + 1. The same temperature as in sampling makes these comparable with behaviour
    log-probabilities.
    """
    scaled_TV = _scaled(logits_TV, temperature)
    chosen_T = scaled_TV.gather(1, targets_T[:, None]).squeeze(1)
    return chosen_T - scaled_TV.logsumexp(dim=1)


def next_token_entropies(logits_TV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return -sum_v p_v log p_v of each softmax(logits / temperature), float32, nats, `[T]`."""
    logprobs_TV = scaled_log_softmax(logits_TV, temperature)
    return -(logprobs_TV.exp() * logprobs_TV).sum(dim=1)


def scaled_log_softmax(logits_TV: Tensor, temperature: float) -> Tensor:
    return _scaled(logits_TV, temperature).log_softmax(dim=1)


def bucket_logprobs(logprobs_TV: Tensor, top_Tk: Tensor) -> Tensor:
    """Return log-probabilities of k tokens, and of all others as one, `[T, K]`, given all of them.

    The last one is added up of its own tokens: 1 minus the others' sum would be noise where it is
    small.
    """
    import torch  # here: recipes are read without it

    rest_TV = logprobs_TV.scatter(1, top_Tk, -torch.inf)
    return torch.cat([logprobs_TV.gather(1, top_Tk), rest_TV.logsumexp(1, keepdim=True)], dim=1)


def _scaled(logits_TV: Tensor, temperature: float) -> Tensor:
    """Return float32 logits over the temperature; at 1 without a copy of them."""
    logits_TV = logits_TV.float()
    return logits_TV if temperature == 1 else logits_TV / temperature


def detached_entropies(logits_TV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return `next_token_entropies` without gradient, from a few rows at a time.

    A metric must not cost another copy of `[T, V]`.
    """
    import torch  # here: recipes are read without it

    num_rows = max(1, CHUNK_NUMBERS // logits_TV.shape[1])
    chunks = torch.split(logits_TV.detach(), num_rows)
    return torch.cat([next_token_entropies(chunk, temperature=temperature) for chunk in chunks])


def bounded_exp(log_ratio_T: Tensor) -> Tensor:
    """Return exp(min(x, MAX_LOG_RATIO)), without gradient beyond the bound.

    An infinite log-ratio comes of damaged data. It stays infinite, so that the step is refused.
    """
    return log_ratio_T.where(~beyond_bound(log_ratio_T), MAX_LOG_RATIO).exp()


def beyond_bound(log_ratio_T: Tensor) -> Tensor:
    """Return where `bounded_exp` bounds a ratio."""
    return (log_ratio_T > MAX_LOG_RATIO) & log_ratio_T.isfinite()


def at_bound(ratio_T: Tensor) -> Tensor:
    """Return where `bounded_exp` made a ratio, and left it without gradient."""
    return ratio_T > 0.999 * exp(MAX_LOG_RATIO)


def overflow_fraction(*log_ratios_T: Tensor) -> Metric:
    bounded = [beyond_bound(log_ratio_T) for log_ratio_T in log_ratios_T]
    return mean(sum(bounded[1:], bounded[0]) > 0)


def kl_to_reference(
    logprobs_T: Tensor, reference_logprobs_T: Tensor, estimator: KLEstimator
) -> Tensor:
    """Return estimates of KL(pi_theta || pi_ref) at tokens of pi_theta, one a token.

    With x = log pi_ref - log pi_theta: k1 = -x, unbiased; k2 = x^2 / 2, biased, whose gradient is
    that of the KL; k3 = e^x - 1 - x, unbiased and never negative (J. Schulman, "Approximating KL
    divergence", 2020; the KL of GRPO, arXiv 2402.03300, equation 4, is k3).
    """
    log_ratio_T = reference_logprobs_T - logprobs_T
    if estimator == "k1":
        return -log_ratio_T
    if estimator == "k2":
        return log_ratio_T.square() / 2
    log_ratio_T = log_ratio_T.clamp(max=MAX_LOG_RATIO)
    return log_ratio_T.expm1() - log_ratio_T


def sequence_sums(values_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    return values_T.new_zeros(num_sequences).index_add(0, sequence_T, values_T)


def sequence_means(values_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    lengths_S = sequence_sums(values_T.new_ones(len(values_T)), sequence_T, num_sequences)
    return sequence_sums(values_T, sequence_T, num_sequences) / lengths_S.clamp(min=1)


def sequence_weights(log_weight_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """Return mean and maximum of exp(log-weight) over each sequence, `[2, S]`; NaN without any."""
    import torch  # here: recipes are read without torch

    weight_T = bounded_exp(log_weight_T)
    maximum_S = weight_T.new_full((num_sequences,), torch.nan)
    maximum_S.scatter_reduce_(0, sequence_T, weight_T, "amax", include_self=False)
    mean_S = sequence_means(weight_T, sequence_T, num_sequences)
    return torch.stack([mean_S.where(~maximum_S.isnan(), torch.nan), maximum_S])


def expand_to_tokens(values_S: Tensor, sequence_T: Tensor) -> Tensor:
    """Return the value of each token's sequence, `[T]`, with gradients of the same bits again."""
    from areal_flow.algorithms.gather import (  # here: recipes are read without torch
        GatherIndex,
        deterministic_gather,
    )

    return deterministic_gather(values_S, GatherIndex.of(sequence_T, len(values_S)))


def suffix_sums(values_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    """Return, at each entry, the sum of its sequence's values from there to the end."""
    exact_T = values_T.double()
    ends_S = sequence_sums(exact_T, sequence_T, num_sequences).cumsum(0)
    return (ends_S[sequence_T] - exact_T.cumsum(0) + exact_T).to(values_T.dtype)


def zero_gap_sums(ranks: Iterable[int], device: str) -> dict[int, Tensor]:
    """Return zeros, to which each rank adds the sums of its micro-batches."""
    import torch  # here: recipes are read without torch

    shape = NUM_MOMENTS + NUM_BINS
    return {rank: torch.zeros(shape, dtype=torch.float64, device=device) for rank in ranks}


def gap_sums(trainer_T: Tensor, engine_T: Tensor, fresh_T: Tensor) -> Tensor:
    """Return sums that add up over tokens, float64: of moments, then how many are in each bin.

    They say how far the log-probabilities of a rollout engine are from the trainer's, with the same
    weights.

    Args:
        fresh_T: which tokens count: those that the policy before the step sampled itself, so that
            none of their gap is staleness and all of it is numerics. Those whose difference is not
            finite do not.
    """
    trainer_T, engine_T = trainer_T.double(), engine_T.double()
    counted_T = fresh_T & (trainer_T - engine_T).isfinite()
    trainer_T, engine_T = trainer_T.where(counted_T, 0.0), engine_T.where(counted_T, 0.0)
    difference_T = (trainer_T - engine_T).abs()
    p_T, q_T = trainer_T.exp(), engine_T.exp()
    kl_T = kl_to_reference(engine_T, trainer_T, "k3")
    ones_T = p_T.new_ones(len(p_T))
    values = ones_T, difference_T, kl_T, p_T, q_T, p_T.square(), q_T.square(), p_T * q_T
    place_T = (difference_T.log10() - FIRST_DECADE) * BINS_PER_DECADE
    sums_G = p_T.new_zeros(NUM_MOMENTS + NUM_BINS)
    for index, values_T in enumerate(values):
        sums_G[index] = values_T.where(counted_T, 0.0).sum()
    bins_T = place_T.clamp(0, NUM_BINS - 1).long()
    return sums_G.index_add_(0, NUM_MOMENTS + bins_T, counted_T.double())


def gap_metrics(sums_G: Tensor) -> dict[str, float]:
    """Return the metrics of all tokens that `gap_sums` counted; none without a token.

    The KL divergence of the trainer's policy from the engine's is estimated by k3, w - 1 - log w
    with w the trainer's probability over the engine's (J. Schulman, "Approximating KL divergence",
    2020). The correlation (Pearson's, of the probabilities) is left out where they are all equal.
    """
    sums = sums_G.tolist()  # the one place that waits for the device
    number = sums[0]
    if not number:
        return {}
    difference, kl, p, q, pp, qq, pq = (each / number for each in sums[1:NUM_MOMENTS])
    metrics = {
        "tokens": number,
        "logprob_difference_mean": difference,
        "logprob_difference_p99": _percentile(np.array(sums[NUM_MOMENTS:])),
        "kl": kl,
    }
    variances = pp - p * p, qq - q * q
    if min(variances) > 1e-12 * max(pp, qq):
        correlation = (pq - p * q) / (variances[0] * variances[1]) ** 0.5
        metrics["probability_correlation"] = min(1.0, correlation)
    return {f"{ENGINE_GAP}{name}": value for name, value in metrics.items()}


def _percentile(counts: np.ndarray) -> float:
    """Return `PERCENTILE` of what is in the bins, as if it were even in each, on a log scale."""
    below = np.concatenate([[0.0], counts.cumsum()])
    target = PERCENTILE * below[-1]
    index = int(np.searchsorted(below[1:], target))
    share = (target - below[index]) / counts[index]
    if index == 0:
        return float(share * 10.0 ** (FIRST_DECADE + 1 / BINS_PER_DECADE))
    return float(10.0 ** (FIRST_DECADE + (index + share) / BINS_PER_DECADE))
