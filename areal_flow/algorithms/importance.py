"""Which policy a ratio is taken to, and what becomes of the weights that correct for staleness.

With u = pi_theta / pi_prox, the ratio that an objective clips, and w = pi_prox / pi_behav, the
importance weight beside it, w u is the whole distance from the policy that sampled. Letters: T
trained tokens of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from areal_flow.algorithms.logprobs import bounded_exp, sequence_means

if TYPE_CHECKING:
    from torch import Tensor

    from areal_flow.algorithms.protocol import LossInputs

Proximal = Literal["recomputed", "interpolated", "behavior"]
ImportanceWeightRule = Literal["full", "truncate", "mask", "mask_sequence"]


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
    sequence_T: Tensor,
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
        judged_T = bounded_exp(sequence_means(log_weight_T, sequence_T))[sequence_T]
    return weight_T.where((judged_T <= cap) & (judged_T >= (floor or 0.0)), 0.0)
