"""Draws tokens from logits, with the log-probability of each under the distribution it came from.

Changes of the distribution are made in vLLM's order: suppressed stop tokens, repetition penalty,
temperature, min-p, top-k, top-p.

Uniform numbers are a function of (seed, position), so a completion's randomness does not depend on
its slot, its neighbours, a retry or an interruption.

Letters: S sequences, V vocabulary, B blocks of b tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from areal_flow.core.types import Sampling, Tokens

_GOLDEN = 0x9E3779B97F4A7C15
_BLOCK = 128


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Return one float64 in [0, 1) for each pair of seed and token position.

    SplitMix64's finaliser (Steele, Lea and Flood 2014) over seed + (position + 1) * golden ratio.
    """
    state = np.array(seeds, dtype=np.uint64)
    counter = np.array(positions, dtype=np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        state = _mix(state) + counter * np.uint64(_GOLDEN)
        state = _mix(state)
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(state ^ (state >> np.uint64(31)))


def sample(logits_SV: Tensor, uniforms_S: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    Return tokens `[S]` and their log-probabilities `[S]` in the distribution that was sampled from;
    `uniforms_S` are float64 in [0, 1).
    """
    is_plain = not (sampling.min_p or sampling.top_k) and sampling.top_p == 1
    if logits_SV.dtype == torch.bfloat16 and sampling.temperature > 0 and is_plain:
        # Half as many passes over the vocabulary; float32 sums are more precise than such logits.
        probabilities_SV = _scaled(logits_SV, sampling.temperature).softmax(dim=1)
        tokens_S = _invert(probabilities_SV, uniforms_S, sums=torch.float32)
        return tokens_S, probabilities_SV.gather(1, tokens_S[:, None]).squeeze(1).log()
    logprobs_SV = processed_logprobs(logits_SV, sampling)
    tokens_S = _invert(logprobs_SV.exp(), uniforms_S, sums=torch.float64)
    return tokens_S, logprobs_SV.gather(1, tokens_S[:, None]).squeeze(1)


def _invert(probabilities_SV: Tensor, uniforms_S: Tensor, *, sums: torch.dtype) -> Tensor:
    """Return the token `[S]` at which each row's cumulative distribution passes its uniform number.

    The block of tokens is searched first, so that only one block is summed token by token.
    """
    if padding := -probabilities_SV.shape[1] % _BLOCK:
        probabilities_SV = pad(probabilities_SV, (0, padding))
    blocks_SBb = probabilities_SV.view(len(uniforms_S), -1, _BLOCK)
    blocks_S, within_S = _pass(blocks_SBb.sum(dim=2, dtype=sums).double(), uniforms_S)
    rows_S = torch.arange(len(blocks_S), device=blocks_S.device)
    tokens_S, _ = _pass(blocks_SBb[rows_S, blocks_S].double(), within_S)
    return blocks_S * _BLOCK + tokens_S


def _pass(masses_SB: Tensor, uniforms_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return where cumulative masses pass a share of their sum, and the share of that mass."""
    cumulative_SB = masses_SB.cumsum(dim=1)
    # Strictly below the sum, so that rounding cannot choose a token without mass.
    targets_S1 = (uniforms_S.clamp(max=1 - 2.0**-52) * cumulative_SB[:, -1])[:, None]
    index_S1 = torch.searchsorted(cumulative_SB, targets_S1, right=True)
    mass_S1, end_S1 = masses_SB.gather(1, index_S1), cumulative_SB.gather(1, index_S1)
    return index_S1[:, 0], (1 - (end_S1 - targets_S1) / mass_S1)[:, 0].clamp(min=0)


def adjust_logits(
    logits_SV: Tensor, sampling: Sampling, prompts: Sequence[Tokens], sampled: Sequence[Tokens]
) -> Tensor:
    """Return float32 logits without early stop tokens, and with repetitions penalized.

    The logit of a token in the prompt or completion is divided by the repetition penalty if it is
    positive, else multiplied (CTRL, arXiv 1909.05858, section 4.1, with the sign that all engines
    use).
    """
    logits_SV = logits_SV.float()
    if early := [row for row, own in enumerate(sampled) if len(own) < sampling.min_new_tokens]:
        logits_SV = logits_SV.clone()
        for stop in sampling.stop_token_ids:
            logits_SV[early, stop] = float("-inf")
    if sampling.repetition_penalty == 1:
        return logits_SV
    seen_SV = torch.zeros(logits_SV.shape, dtype=torch.bool)
    for seen_V, prompt, own in zip(seen_SV.numpy(), prompts, sampled, strict=True):
        seen_V[prompt] = seen_V[own] = True
    factors_SV = torch.where(
        logits_SV > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty
    )
    return torch.where(seen_SV.to(logits_SV.device), logits_SV * factors_SV, logits_SV)


def processed_logprobs(logits_SV: Tensor, sampling: Sampling) -> Tensor:
    """Return float32 log-probabilities after temperature, min-p, top-k and top-p, renormalised.

    At temperature 0 the most likely token, or the first of several, has all probability.
    """
    if sampling.temperature == 0:
        logprobs_SV = torch.full_like(logits_SV, float("-inf"), dtype=torch.float32)
        return logprobs_SV.scatter_(1, logits_SV.argmax(dim=1, keepdim=True), 0.0)
    logprobs_SV = _scaled(logits_SV, sampling.temperature).log_softmax(dim=1)
    if sampling.min_p > 0:
        largest_S1 = logprobs_SV.amax(dim=1, keepdim=True)
        logprobs_SV = _keep_from(logprobs_SV, largest_S1 + log(sampling.min_p))
    if sampling.top_k:
        kept = min(sampling.top_k, logprobs_SV.shape[1])
        logprobs_SV = _keep_from(logprobs_SV, logprobs_SV.topk(kept, dim=1).values[:, -1:])
    if sampling.top_p < 1:
        logprobs_SV = _keep_top_p(logprobs_SV, sampling.top_p)
    return logprobs_SV


def _scaled(logits_SV: Tensor, temperature: float) -> Tensor:
    logits_SV = logits_SV.float()
    return logits_SV if temperature == 1 else logits_SV / temperature


def _keep_from(logprobs_SV: Tensor, threshold_S1: Tensor) -> Tensor:
    return logprobs_SV.masked_fill(logprobs_SV < threshold_S1, float("-inf")).log_softmax(dim=1)


def _keep_top_p(logprobs_SV: Tensor, top_p: float) -> Tensor:
    ordered_SV, order_SV = logprobs_SV.sort(dim=1, descending=True)
    mass_before_SV = ordered_SV.exp().cumsum(dim=1) - ordered_SV.exp()
    kept_SV = ordered_SV.masked_fill(mass_before_SV >= top_p, float("-inf"))
    return torch.empty_like(kept_SV).scatter_(1, order_SV, kept_SV).log_softmax(dim=1)
