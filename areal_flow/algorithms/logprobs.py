"""Log-probabilities of tokens and entropies of the distributions they are drawn from, by logits.

Letters: T positions, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor


def next_token_logprobs(
    logits_TV: Tensor, targets_T: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """Return log softmax(logits / temperature) of each target, float32, `[T]`.

    `logits_TV[t]` is the distribution of the token *after* position t, so the caller pairs it with
    the token at t + 1. The same temperature as in sampling makes these comparable with behaviour
    log-probabilities.
    """
    scaled_TV = logits_TV.float() / temperature
    chosen_T = scaled_TV.gather(1, targets_T[:, None]).squeeze(1)
    return chosen_T - scaled_TV.logsumexp(dim=1)


def next_token_entropies(logits_TV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return -sum_v p_v log p_v of each softmax(logits / temperature), float32, nats, `[T]`."""
    logprobs_TV = (logits_TV.float() / temperature).log_softmax(dim=1)
    return -(logprobs_TV.exp() * logprobs_TV).sum(dim=1)
