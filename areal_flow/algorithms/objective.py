"""The parts of a loss: an objective, importance weights, divergences, and what is watched of them.

With u = pi_theta / pi_prox, the ratio that an objective bounds, and w = pi_prox / pi_behav, the
importance weight beside it, w u is the whole distance from the policy that sampled. Letters: T
trained tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from areal_flow.algorithms.logprobs import MAX_LOG_RATIO, bounded_exp, sequence_means
from areal_flow.algorithms.protocol import (
    LossInputs,
    Metric,
    effective_sample_fraction,
    maximum,
    mean,
)

if TYPE_CHECKING:
    from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]
Proximal = Literal["recomputed", "interpolated", "behavior"]
ImportanceWeightRule = Literal["full", "truncate", "mask", "mask_sequence"]


@dataclass(frozen=True, slots=True)
class Objective:
    """What an algorithm maximises at each token, and where it bounds that."""

    values_T: Tensor
    ratio_T: Tensor
    """The ratio that the objective bounds, to be watched."""
    low_T: Tensor
    """Where the bound below was reached."""
    high_T: Tensor
    """Where the bound above was."""
    ends_gradients: bool = True
    """Whether a token has no gradient there; False: only its weight is bounded."""


def objective_metrics(objective: Objective) -> dict[str, Metric]:
    return {
        "clip_fraction": mean(objective.low_T | objective.high_T),
        "clip_low_fraction": mean(objective.low_T),
        "clip_high_fraction": mean(objective.high_T),
        "ratio_mean": mean(objective.ratio_T),
        "ratio_max": maximum(objective.ratio_T),
        "ratio_ess_fraction": effective_sample_fraction(objective.ratio_T),
    }


def weight_metrics(log_weight_T: Tensor, corrected_T: Tensor) -> dict[str, Metric]:
    """Return what to watch of importance weights: as they are, before a rule bounds them."""
    weight_T = bounded_exp(log_weight_T)
    return {
        "importance_weight_mean": mean(weight_T),
        "importance_weight_max": maximum(weight_T),
        "importance_weight_ess_fraction": effective_sample_fraction(weight_T),
        "importance_weight_masked_fraction": mean(corrected_T == 0),
        "kl_proximal_behavior": mean(kl_from_older(log_weight_T)),
    }


def proximal_logprobs(inputs: LossInputs, proximal: Proximal) -> Tensor:
    """Return log pi_prox of each token, without gradient.

    recomputed: the policy before the step, by a forward pass (AReaL, arXiv 2505.24298, sec. 5.2).
    behavior: the policy that sampled the token, which makes of decoupled PPO plain PPO.
    interpolated: log pi_behav / (d + 1) + log pi_theta d / (d + 1) of a token that is d versions
    old (A-3PO, arXiv 2512.06547): no forward pass. Versions v give the weight of the trained
    policy, (v_prox - v_behav) / (v_theta - v_behav): the step turns v_prox into v_theta = v_prox
    + 1. A token of d = 0 was sampled by the proximal policy itself.
    """
    behavior_T = inputs.behavior_logprobs_T
    if proximal == "recomputed":
        return inputs.proximal_logprobs_T
    if proximal == "behavior":
        return behavior_T
    staleness_T = (inputs.policy_version - inputs.versions_T).to(behavior_T.dtype)
    policy_T = inputs.logprobs_T.detach()
    return behavior_T + staleness_T / (staleness_T + 1) * (policy_T - behavior_T)


def corrected_weights(
    log_weight_T: Tensor,
    inputs: LossInputs,
    *,
    rule: ImportanceWeightRule,
    floor: float | None,
    cap: float,
) -> Tensor:
    """Return each token's importance weight after a rule; 0 is a token without gradient.

    full: w as it is. truncate: min(w, cap), truncated importance sampling (TIS; V-trace, arXiv
    1802.01561, section 4.1). mask: w where floor <= w <= cap, else 0 (masked importance sampling
    with a cap alone; IcePop, arXiv 2510.18855, with both). mask_sequence: w where the
    geometric mean of the sequence's weights lies in that range, else 0, so that a sequence is
    trained as a whole or not at all.
    """
    weight_T = bounded_exp(log_weight_T)
    if rule == "full":
        return weight_T
    if rule == "truncate":
        return weight_T.clamp(max=cap)
    judged_T = weight_T
    if rule == "mask_sequence":
        means_S = sequence_means(log_weight_T, inputs.sequence_T, inputs.num_sequences)
        judged_T = bounded_exp(means_S)[inputs.sequence_T]
    return weight_T.where((judged_T <= cap) & (judged_T >= (floor or 0.0)), 0.0)


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


def kl_over_buckets(inputs: LossInputs) -> Tensor:
    """Return KL(pi_theta || pi_ref) in the place of each token, over buckets of the vocabulary.

    sum_b p_b (log p_b - log q_b), b the k tokens with the largest q and R, all others as one (the
    reverse KL with a tail: TA-OPD, arXiv 2608.14728; over all tokens: GKD, arXiv 2306.13649,
    section 3). By the chain rule the whole divergence is this plus p_R KL(p(.|R) || q(.|R)): it is
    never below this one, which is never negative, and equals it at k = V - 1. The gradient is that
    of the token's own distribution; the tokens before it are given, as they are in GKD.
    """
    logprobs_TK, reference_TK = inputs.bucket_logprobs_TK, inputs.reference_bucket_logprobs_TK
    assert logprobs_TK is not None, "a trainer gives them where they are needed"
    assert reference_TK is not None, "a trainer gives both"
    return (logprobs_TK.exp() * (logprobs_TK - reference_TK)).sum(dim=1)


def kl_from_older(log_ratio_T: Tensor) -> Tensor:
    """Return r log r - (r - 1) of each ratio r = pi_new / pi_old at tokens that pi_old drew.

    Its mean is KL(pi_new || pi_old), without bias, and no entry is negative.
    """
    log_ratio_T = log_ratio_T.detach().clamp(max=MAX_LOG_RATIO)
    return log_ratio_T.exp() * log_ratio_T - log_ratio_T.expm1()
