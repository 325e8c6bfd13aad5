"""Log-probabilities and advantages in, a loss out. Letters: T packed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

ImportanceWeightRule = Literal["full", "truncate", "mask"]


@dataclass(frozen=True)
class PolicyLoss:
    """A summed loss and what to watch; divide sums by the tokens of the optimizer step."""

    loss_sum: Tensor
    num_clipped: Tensor
    importance_weight_sum: Tensor
    importance_weight_max: Tensor


class TokenLoss(Protocol):
    """What a training step minimises; see `decoupled_ppo_loss`, which is one, for the arguments."""

    def __call__(
        self,
        logprobs_T: Tensor,
        *,
        proximal_logprobs_T: Tensor,
        behavior_logprobs_T: Tensor,
        advantages_T: Tensor,
        epsilon_low: float,
        epsilon_high: float,
        importance_weight_rule: ImportanceWeightRule,
        importance_weight_cap: float,
    ) -> PolicyLoss: ...


def decoupled_ppo_loss(
    logprobs_T: Tensor,
    *,
    proximal_logprobs_T: Tensor,
    behavior_logprobs_T: Tensor,
    advantages_T: Tensor,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    importance_weight_rule: ImportanceWeightRule = "full",
    importance_weight_cap: float = 5.0,
) -> PolicyLoss:
    """Sum the decoupled PPO loss over trained tokens (AReaL, arXiv 2505.24298, eq. 5).

    loss_t = - w_t min(u_t A_t, clip(u_t, 1 - epsilon_low, 1 + epsilon_high) A_t)
    with u_t = pi_theta / pi_prox and w_t = pi_prox / pi_behav.

    The clip is centred on the policy before the step (proximal), and not on the older policies
    that sampled the tokens (behaviour): stale data is reweighted, not clipped away.

    Args:
        logprobs_T: of the policy being trained; the only argument with a gradient.
        proximal_logprobs_T, behavior_logprobs_T, advantages_T: aligned with it, trained tokens.
        importance_weight_rule: "full" keeps w; "truncate" clamps it at the cap; "mask" gives tokens
            beyond the cap no gradient. The divisor counts such tokens all the same.
    """
    ratio_T = (logprobs_T - proximal_logprobs_T).exp()
    clipped_T = ratio_T.clamp(1 - epsilon_low, 1 + epsilon_high)
    surrogate_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    weight_T = (proximal_logprobs_T - behavior_logprobs_T).exp()
    applied_T = apply_importance_weight_rule(
        weight_T, rule=importance_weight_rule, cap=importance_weight_cap
    )
    return PolicyLoss(
        loss_sum=-(applied_T * surrogate_T).sum(),
        num_clipped=clip_binds(
            ratio_T, advantages_T, epsilon_low=epsilon_low, epsilon_high=epsilon_high
        ).sum(),
        importance_weight_sum=weight_T.sum(),
        importance_weight_max=weight_T.max() if weight_T.numel() else weight_T.sum(),
    )


def clip_binds(
    ratio_T: Tensor, advantages_T: Tensor, *, epsilon_low: float, epsilon_high: float
) -> Tensor:
    """Return where the clip ends the gradient: u left its range, to the advantage's side."""
    clipped_T = ratio_T.clamp(1 - epsilon_low, 1 + epsilon_high)
    return clipped_T * advantages_T < ratio_T * advantages_T


def apply_importance_weight_rule(
    weight_T: Tensor, *, rule: ImportanceWeightRule, cap: float
) -> Tensor:
    """Return the importance weights after the optional correction; see `decoupled_ppo_loss`."""
    match rule:
        case "full":
            return weight_T
        case "truncate":
            return weight_T.clamp(max=cap)
        case "mask":
            return weight_T.where(weight_T <= cap, 0.0)
