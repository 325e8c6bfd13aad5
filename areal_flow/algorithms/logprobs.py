"""Logits in, log-probabilities of the tokens that followed out.

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
