"""Decoupled PPO: stale tokens are reweighted, and clipped against the policy before the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from areal_flow.algorithms.critic_free import CriticFree
from areal_flow.algorithms.protocol import LossInputs, PolicyLoss, maximum, mean
from areal_flow.algorithms.ratios import bounded_exp, clipped_surrogate, overflow_fraction

if TYPE_CHECKING:
    from torch import Tensor

ImportanceWeightRule = Literal["full", "truncate", "mask"]


class DecoupledPPO(CriticFree):
    """Decoupled PPO (AReaL, arXiv 2505.24298, eq. 5)."""

    name: Literal["decoupled_ppo"] = "decoupled_ppo"
    """Which algorithm trains; each has settings of its own."""
    epsilon: float = Field(0.2, gt=0)
    """How far u may leave 1 before the clip ends a token's gradient."""
    epsilon_high: float | None = Field(None, gt=0)
    """The same upwards; as epsilon, if not given."""
    importance_weight_rule: ImportanceWeightRule = "full"
    """What becomes of a large w: kept, clamped at the cap, or no gradient beyond the cap."""
    importance_weight_cap: float = Field(5.0, gt=1)
    """The cap of the rules truncate and mask."""

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """Return l_t = - w_t min(u_t A_t, clip(u_t, 1 - epsilon_low, 1 + epsilon_high) A_t).

        With u_t = pi_theta / pi_prox and w_t = pi_prox / pi_behav. The clip is centred on the
        policy before the step (proximal), and not on the older policies that sampled the tokens
        (behaviour): stale data is reweighted, not clipped away. A token that "mask" leaves without
        gradient counts in the divisor all the same.
        """
        log_ratio_T = inputs.logprobs_T - inputs.proximal_logprobs_T
        log_weight_T = inputs.proximal_logprobs_T - inputs.behavior_logprobs_T
        surrogate_T, clipped_T = clipped_surrogate(
            bounded_exp(log_ratio_T),
            inputs.advantages_T,
            epsilon_low=self.epsilon,
            epsilon_high=self.epsilon_high or self.epsilon,
        )
        weight_T = bounded_exp(log_weight_T)
        metrics = {
            "clip_fraction": mean(clipped_T),
            "importance_weight_mean": mean(weight_T),
            "importance_weight_max": maximum(weight_T),
            "ratio_overflow_fraction": overflow_fraction(log_ratio_T, log_weight_T),
        }
        return PolicyLoss(-(self._apply_rule(weight_T) * surrogate_T), metrics, clipped_T)

    def _apply_rule(self, weight_T: Tensor) -> Tensor:
        cap = self.importance_weight_cap
        match self.importance_weight_rule:
            case "full":
                return weight_T
            case "truncate":
                return weight_T.clamp(max=cap)
            case "mask":
                return weight_T.where(weight_T <= cap, 0.0)
