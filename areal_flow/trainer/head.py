"""Log-probabilities and entropies of a policy's tokens, without logits of all of them at once.

Logits of 32,000 tokens over a vocabulary of 152,000 are 19 GB, and the softmax and gradients as
much again. Here one chunk of tokens has logits, which are computed again for its gradients.

Letters: M trained tokens of a micro-batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from areal_flow.algorithms.logprobs import (
    detached_entropies,
    next_token_entropies,
    next_token_logprobs,
)
from areal_flow.models import segments
from areal_flow.models.attention import pass_dtype
from areal_flow.models.logits import linear_head, logits_of, logits_of_products
from areal_flow.models.policy import hidden_at
from areal_flow.models.reward_model import is_reward_model, scores_at
from areal_flow.trainer.linear_logprobs import LinearHead, linear_logprobs
from areal_flow.trainer.sequences import MicroBatch, padded

CHUNK_NUMBERS = 2**25
"""Logits that are there at a time: 128 MiB of float32, and four times that at the peak."""

Entropies = Callable[..., Tensor]


def token_logprobs(policy: Any, micro: MicroBatch, *, temperature: float) -> Tensor:
    """Return log-probabilities `[M]` of the trained tokens, or a reward model's scores; float32."""
    return _in_chunks(policy, micro, temperature, entropies=None)[0]


def token_logprobs_and_entropies(
    policy: Any, micro: MicroBatch, *, temperature: float, entropy_has_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return the same and entropies in nats, each `[M]`, float32; a reward model's are zeros."""
    entropies = next_token_entropies if entropy_has_gradient else detached_entropies
    logprobs_M, entropy_M = _in_chunks(policy, micro, temperature, entropies=entropies)
    return logprobs_M, entropy_M


def _in_chunks(
    policy: Any, micro: MicroBatch, temperature: float, *, entropies: Entropies | None
) -> tuple[Tensor, ...]:
    if is_reward_model(policy):
        scores_M = scores_at(policy, micro.input_ids_1T, micro.layout, micro.trained_M)
        return scores_M, torch.zeros_like(scores_M)
    # On a CPU logits are kept for their gradients where they fit, and products are oneDNN's.
    if segments.has_kernels(policy.device) and (head := linear_head(policy)) is not None:
        hidden_MH = hidden_at(policy, micro.input_ids_1T, micro.layout, micro.predicting_M)
        linear = LinearHead(
            head.weight,
            head.bias,
            partial(logits_of_products, policy),
            temperature,
            needs_entropy=entropies is not None,
            entropy_has_gradient=entropies is next_token_entropies,
        )
        return linear_logprobs(hidden_MH.to(pass_dtype(head.weight)), micro.targets_M, linear)
    num_trained = len(micro.targets_M)
    num_rows = max(1, CHUNK_NUMBERS // policy.config.get_text_config().vocab_size)
    of_chunk = partial(_of_chunk, policy, temperature=temperature, entropies=entropies)
    if num_trained <= num_rows:
        padding = (0, padded(num_trained) - num_trained)
        predicting_M, targets_M = (
            pad(each, padding) for each in (micro.predicting_M, micro.targets_M)
        )
        hidden_MH = hidden_at(policy, micro.input_ids_1T, micro.layout, predicting_M)
        # No views: FSDP has hooks on what a pass returns, which it would lose of changed views.
        return tuple(column[:num_trained].clone() for column in of_chunk(hidden_MH, targets_M))
    hidden_MH = hidden_at(policy, micro.input_ids_1T, micro.layout, micro.predicting_M)
    if torch.is_grad_enabled():
        of_chunk = partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=False)
    chunks = zip(
        torch.split(hidden_MH, num_rows), torch.split(micro.targets_M, num_rows), strict=True
    )
    columns = zip(*(of_chunk(*chunk) for chunk in chunks), strict=True)
    return tuple(torch.cat(column) for column in columns)


def _of_chunk(
    policy: Any,
    hidden_MH: Tensor,
    targets_M: Tensor,
    *,
    temperature: float,
    entropies: Entropies | None,
) -> tuple[Tensor, ...]:
    logits_MV = logits_of(policy, hidden_MH)
    logprobs_M = next_token_logprobs(logits_MV, targets_M, temperature=temperature)
    if entropies is None:
        return (logprobs_M,)
    return logprobs_M, entropies(logits_MV, temperature=temperature)
