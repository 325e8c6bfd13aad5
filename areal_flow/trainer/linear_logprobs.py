"""Log-probabilities and entropies of a linear head, chunk by chunk, with one weight gradient.

Products have operands of a pass's type, bfloat16 for example, and are added up in float32, which
they stay in. What a loss makes of each token's numbers is known after all chunks, so that the
backward pass multiplies each chunk again. Liger's function of this shape (0.8) adds up gradients of
weights in bfloat16, off by 0.7% after 32 chunks, rounds entropies to it, asks for weights of it,
and knows no scaled or capped logits.

Letters: M tokens, m tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from areal_flow.models import segments

CHUNK_NUMBERS = 2**26
"""Logits that are there at a time: 256 MiB of float32, and three times that at the peak."""

ADDED_ROWS = 2**13
"""Of the vocabulary: their part of a weight gradient is added at a time."""

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LinearHead:
    weight_VH: Tensor
    bias_V: Tensor | None
    transform: Callable[[Tensor], Tensor]
    """Makes logits of products: each of its own product alone."""
    temperature: float
    needs_entropy: bool
    """Whether entropies are zeros else."""
    entropy_has_gradient: bool


def linear_logprobs(
    hidden_MH: Tensor, targets_M: Tensor, head: LinearHead
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of targets and entropies in nats, each `[M]`, float32.

    Hidden states are in the type that is multiplied in.
    """
    with torch.autocast(hidden_MH.device.type, enabled=False):
        logprobs_M, entropy_M = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden_MH, head.weight_VH, head.bias_V, targets_M, head
        )
    return logprobs_M, entropy_M


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_M: Tensor,
        head: LinearHead,
    ) -> tuple[Tensor, Tensor]:
        weight = weight_VH.to(hidden_MH.dtype)
        logprobs_M = _product(hidden_MH[:0], weight.T).new_empty(len(hidden_MH))
        entropy_M = torch.zeros_like(logprobs_M)
        for chunk in _chunks(len(hidden_MH), len(weight_VH)):
            products_mV = _products(hidden_MH[chunk], weight, bias_V)
            logprobs_mV = _log_softmax(head.transform(products_mV), head.temperature)
            del products_mV
            logprobs_M[chunk] = logprobs_mV.gather(1, targets_M[chunk, None])[:, 0]
            if head.needs_entropy:
                entropy_M[chunk] = logprobs_mV.exp().mul_(logprobs_mV).sum(dim=1).neg_()
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, targets_M, entropy_M)
        ctx.head = head
        if not head.entropy_has_gradient:
            ctx.mark_non_differentiable(entropy_M)
        return logprobs_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_logprob_M, by_entropy_M = gradients
        head: LinearHead = ctx.head
        hidden_MH, weight_VH, bias_V, targets_M, entropy_M = ctx.saved_tensors
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        weight = weight_VH.to(hidden_MH.dtype)
        of_hidden_MH = torch.empty_like(hidden_MH)
        of_weight_VH = torch.zeros_like(weight_VH, dtype=entropy_M.dtype) if needs_weight else None
        of_bias_V = torch.zeros_like(bias_V, dtype=entropy_M.dtype) if needs_bias else None
        for chunk in _chunks(len(hidden_MH), len(weight_VH)):
            products_mV = _products(hidden_MH[chunk], weight, bias_V).requires_grad_()
            with torch.enable_grad():
                logits_mV = head.transform(products_mV)
            # Gradients of logits over the temperature are that much larger.
            of_logits_mV = _logit_gradients(
                _log_softmax(logits_mV.detach(), head.temperature),
                targets_M[chunk, None],
                by_logprob_M[chunk, None] / head.temperature,
                by_entropy_M[chunk, None] / head.temperature if head.entropy_has_gradient else None,
                entropy_M[chunk, None],
            )
            (of_products_mV,) = torch.autograd.grad(logits_mV, products_mV, of_logits_mV)
            del products_mV, logits_mV, of_logits_mV
            if of_bias_V is not None:
                of_bias_V += of_products_mV.sum(dim=0)
            of_products_mV = of_products_mV.to(weight.dtype)
            of_hidden_MH[chunk] = _product(of_products_mV, weight).to(hidden_MH.dtype)
            if of_weight_VH is not None:
                _add_product(of_weight_VH, of_products_mV.T, hidden_MH[chunk])
        return of_hidden_MH, of_weight_VH, of_bias_V, None, None


def _chunks(num_tokens: int, vocabulary: int) -> Iterator[slice]:
    num_rows = max(1, CHUNK_NUMBERS // vocabulary)
    return (slice(at, at + num_rows) for at in range(0, num_tokens, num_rows))


def _log_softmax(logits_mV: Tensor, temperature: float) -> Tensor:
    return (logits_mV if temperature == 1 else logits_mV / temperature).log_softmax(dim=1)


def _logit_gradients(
    logprobs_mV: Tensor,
    targets_m1: Tensor,
    by_logprob_m1: Tensor,
    by_entropy_m1: Tensor | None,
    entropy_m1: Tensor,
) -> Tensor:
    """Return gradients of logits, and overwrite the log-probabilities.

    With a softmax p and its entropy H, log p_t has the gradient 1[t = v] - p_v, and H has
    -p_v (log p_v + H).
    """
    found_mV = logprobs_mV.exp()
    if by_entropy_m1 is None:
        found_mV.mul_(-by_logprob_m1)
    else:
        factors_mV = logprobs_mV.add_(entropy_m1).mul_(by_entropy_m1).add_(by_logprob_m1)
        found_mV.mul_(factors_mV).neg_()
    chosen_m1 = found_mV.gather(1, targets_m1) + by_logprob_m1
    return found_mV.scatter_(1, targets_m1, chosen_m1)


def _products(hidden_mH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    products_mV = _product(hidden_mH, weight_VH.T)
    return products_mV if bias_V is None else products_mV.add_(bias_V)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return a product that is added up, and kept, in float32; of wider factors in their type."""
    if left.dtype not in _HALVES:
        return left @ right
    if segments.has_kernels(left.device):
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _add_product(total_VH: Tensor, left_Vm: Tensor, right_mH: Tensor) -> None:
    """Without a second matrix of the total's size."""
    for at in range(0, len(total_VH), ADDED_ROWS):
        rows = slice(at, at + ADDED_ROWS)
        total_VH[rows] += _product(left_Vm[rows], right_mH)
