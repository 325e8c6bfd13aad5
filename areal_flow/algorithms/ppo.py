"""Plain PPO: the ratio is taken, and clipped, against the policies that sampled the tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal_flow.algorithms.critic_free import CriticFree
from areal_flow.algorithms.protocol import LossInputs, PolicyLoss, maximum, mean
from areal_flow.algorithms.ratios import bounded_exp, clipped_surrogate, overflow_fraction


class PPO(CriticFree):
    """PPO with a clipped surrogate (arXiv 1707.06347, eq. 7) and an entropy bonus (eq. 9)."""

    name: Literal["ppo"] = "ppo"
    """Which algorithm trains; each has settings of its own."""
    epsilon: float = Field(0.2, gt=0)
    """How far the ratio may leave 1 before the clip ends a token's gradient."""
    epsilon_high: float | None = Field(None, gt=0)
    """The same upwards; as epsilon, if not given."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the policy's entropy, which is rewarded; 0 does not compute it."""

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coefficient > 0

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """Return l_t = - min(r_t A_t, clip(r_t, 1 - epsilon_low, 1 + epsilon_high) A_t) - c H_t.

        With r_t = pi_theta / pi_behav and H_t the entropy of the policy at token t. On stale data
        the clip counts the distance to the sampling policy, which earlier steps have used up.
        """
        log_ratio_T = inputs.logprobs_T - inputs.behavior_logprobs_T
        ratio_T = bounded_exp(log_ratio_T)
        surrogate_T, clipped_T = clipped_surrogate(
            ratio_T,
            inputs.advantages_T,
            epsilon_low=self.epsilon,
            epsilon_high=self.epsilon_high or self.epsilon,
        )
        losses_T = -surrogate_T
        metrics = {
            "clip_fraction": mean(clipped_T),
            "ratio_mean": mean(ratio_T),
            "ratio_max": maximum(ratio_T),
            "ratio_overflow_fraction": overflow_fraction(log_ratio_T),
        }
        if inputs.entropy_T is not None:
            losses_T = losses_T - self.entropy_coefficient * inputs.entropy_T
            metrics["entropy_mean"] = mean(inputs.entropy_T)
        return PolicyLoss(losses_T, metrics, clipped_T)
