"""Log-probabilities and entropies of a policy's tokens, without logits of all of them at once.

Logits of 32,000 tokens over a vocabulary of 152,000 are 19 GB, and the softmax and gradients as
much again. Here one chunk of tokens has logits, which are computed again for its gradients.

Letters: M trained tokens of a micro-batch, H hidden size, V vocabulary, k likely tokens, K = k + 1
buckets.
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
    bucket_logprobs,
    detached_entropies,
    next_token_entropies,
    next_token_logprobs,
    scaled_log_softmax,
)
from areal_flow.policy.models import segments
from areal_flow.policy.models.attention import pass_dtype
from areal_flow.policy.models.policy import hidden_at, linear_head, logits_of, logits_of_products
from areal_flow.policy.models.reward_model import is_reward_model, scores_at
from areal_flow.training.linear_logprobs import LinearHead, linear_logprobs, logprob_chunks
from areal_flow.training.sequences import MicroBatch, padded

CHUNK_NUMBERS = 2**25
"""Logits that are there at a time: 128 MiB of float32, and four times that at the peak."""

Entropies = Callable[..., Tensor]


def token_logprobs(policy: Any, micro: MicroBatch, *, temperature: float) -> Tensor:
    """Return log-probabilities `[M]` of the trained tokens, or a reward model's scores; float32."""
    return _in_chunks(policy, micro, temperature, entropies=None)[0]


def token_logprobs_and_entropies(
    policy: Any, micro: MicroBatch, *, temperature: float, entropy_has_gradient: bool
) -> tuple[Tensor, ...]:
    """Return the same and entropies in nats, each `[M]`, float32; a reward model's are zeros.

    Where the micro-batch has likely tokens, `bucket_logprobs` of them come third, `[M, K]`.
    """
    entropies = next_token_entropies if entropy_has_gradient else detached_entropies
    return _in_chunks(policy, micro, temperature, entropies=entropies)


def top_logprobs(
    policy: Any, micro: MicroBatch, *, temperature: float, top_k: int, num_known: int | None
) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens `[M, k]` at each trained one's place, and `bucket_logprobs`.

    Without gradient. At least one token is left for the last bucket.

    Args:
        num_known: of the vocabulary's first tokens are looked at; None: all.
    """
    hidden_MH = hidden_at(policy, micro.input_ids_1T, micro.layout, micro.predicting_M)
    if linear := _linear_head(policy, temperature):
        chunks = logprob_chunks(hidden_MH.to(pass_dtype(linear.weight_VH)), linear)
    else:
        logits = (logits_of(policy, each) for each in torch.split(hidden_MH, _num_rows(policy)))
        chunks = (scaled_log_softmax(each, temperature) for each in logits)
    columns = []
    with torch.autocast(hidden_MH.device.type, enabled=False):
        for logprobs_mV in chunks:
            known_mV = logprobs_mV[:, :num_known]
            top_mk = known_mV.topk(min(top_k, known_mV.shape[1] - 1)).indices
            columns.append((top_mk, bucket_logprobs(logprobs_mV, top_mk)))
    top_Mk, logprobs_MK = map(torch.cat, zip(*columns, strict=True))
    return top_Mk, logprobs_MK


def _in_chunks(
    policy: Any, micro: MicroBatch, temperature: float, *, entropies: Entropies | None
) -> tuple[Tensor, ...]:
    if is_reward_model(policy):
        scores_M = scores_at(policy, micro.input_ids_1T, micro.layout, micro.trained_M)
        return scores_M, torch.zeros_like(scores_M)
    if linear := _linear_head(policy, temperature, entropies):
        hidden_MH = hidden_at(policy, micro.input_ids_1T, micro.layout, micro.predicting_M)
        hidden_MH = hidden_MH.to(pass_dtype(linear.weight_VH))
        return linear_logprobs(hidden_MH, micro.targets_M, linear, micro.top_Mk)
    num_trained, num_rows = len(micro.targets_M), _num_rows(policy)
    given = [micro.targets_M] if micro.top_Mk is None else [micro.targets_M, micro.top_Mk]
    of_chunk = partial(_of_chunk, policy, temperature=temperature, entropies=entropies)
    if num_trained <= num_rows:
        end = padded(num_trained) - num_trained
        predicting_M, *padded_given = (
            pad(each, (0, 0) * (each.ndim - 1) + (0, end)) for each in (micro.predicting_M, *given)
        )
        hidden_MH = hidden_at(policy, micro.input_ids_1T, micro.layout, predicting_M)
        # No views: FSDP has hooks on what a pass returns, which it would lose of changed views.
        return tuple(column[:num_trained].clone() for column in of_chunk(hidden_MH, *padded_given))
    hidden_MH = hidden_at(policy, micro.input_ids_1T, micro.layout, micro.predicting_M)
    if torch.is_grad_enabled():
        of_chunk = partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=False)
    chunks = zip(*(torch.split(each, num_rows) for each in (hidden_MH, *given)), strict=True)
    columns = zip(*(of_chunk(*chunk) for chunk in chunks), strict=True)
    return tuple(torch.cat(column) for column in columns)


def _num_rows(policy: Any) -> int:
    vocabulary: int = policy.config.get_text_config().vocab_size
    return max(1, CHUNK_NUMBERS // vocabulary)


def _linear_head(
    policy: Any, temperature: float, entropies: Entropies | None = None
) -> LinearHead | None:
    # On a CPU logits are kept for their gradients where they fit, and products are oneDNN's: in
    # float32. In bfloat16 they are this head's, which has them multiplied in it.
    is_wide = pass_dtype(next(policy.parameters())) != torch.bfloat16
    if is_wide and not segments.has_fused_kernels(policy.device):
        return None
    if (head := linear_head(policy)) is None:
        return None
    return LinearHead(
        head.weight,
        head.bias,
        partial(logits_of_products, policy),
        temperature,
        needs_entropy=entropies is not None,
        entropy_has_gradient=entropies is next_token_entropies,
    )


def _of_chunk(
    policy: Any,
    hidden_MH: Tensor,
    targets_M: Tensor,
    top_Mk: Tensor | None = None,
    *,
    temperature: float,
    entropies: Entropies | None,
) -> tuple[Tensor, ...]:
    logits_MV = logits_of(policy, hidden_MH)
    logprobs_M = next_token_logprobs(logits_MV, targets_M, temperature=temperature)
    if entropies is None:
        return (logprobs_M,)
    result = logprobs_M, entropies(logits_MV, temperature=temperature)
    if top_Mk is None:
        return result
    return *result, bucket_logprobs(scaled_log_softmax(logits_MV, temperature), top_Mk)
