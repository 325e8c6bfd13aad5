"""Log-probabilities of tokens, entropies, and ratios of two policies' probabilities.

Letters: T positions, or trained tokens of a micro-batch, S its sequences; V vocabulary, k likely
tokens, K = k + 1 buckets.
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING

from areal_flow.algorithms.protocol import Metric, mean

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp of it is 4.9e8. float32 overflows at 88, and the squares of a gradient's norm at 44."""

CHUNK_NUMBERS = 2**22
"""Logits processed at a time without gradient: 16 MiB of float32."""


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


def sequence_sums(values_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    return values_T.new_zeros(num_sequences).index_add(0, sequence_T, values_T)


def sequence_means(values_T: Tensor, sequence_T: Tensor, num_sequences: int) -> Tensor:
    lengths_S = sequence_sums(values_T.new_ones(len(values_T)), sequence_T, num_sequences)
    return sequence_sums(values_T, sequence_T, num_sequences) / lengths_S.clamp(min=1)


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
