"""The algorithms whose gradient ends where a clipped ratio does: PPO, decoupled PPO and GSPO.

They differ in the ratio that is clipped, and in what a token weighs beside it. Letters: T trained
tokens of a micro-batch, S its sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from areal_flow.algorithms.critic_free import Aggregation, CriticFree, sequence_means
from areal_flow.algorithms.logprobs import bounded_exp, overflow_fraction
from areal_flow.algorithms.protocol import LossInputs, Metric, PolicyLoss, maximum, mean

if TYPE_CHECKING:
    from torch import Tensor

ImportanceWeightRule = Literal["full", "truncate", "mask"]


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
        high = self.epsilon_high or self.epsilon
        surrogate_T, clipped_T = clipped_surrogate(ratio_T, inputs, low=self.epsilon, high=high)
        losses_T = -surrogate_T
        metrics = _metrics("ratio", ratio_T, clipped_T, log_ratio_T)
        if inputs.entropy_T is not None:
            losses_T = losses_T - self.entropy_coefficient * inputs.entropy_T
        return PolicyLoss(losses_T, metrics, clipped_T)


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
        ratio_T, weight_T = bounded_exp(log_ratio_T), bounded_exp(log_weight_T)
        high = self.epsilon_high or self.epsilon
        surrogate_T, clipped_T = clipped_surrogate(ratio_T, inputs, low=self.epsilon, high=high)
        metrics = _metrics("importance_weight", weight_T, clipped_T, log_ratio_T, log_weight_T)
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


class GSPO(CriticFree):
    """Group sequence policy optimization (arXiv 2507.18071, section 4).

    It has one ratio a sequence, so that a whole completion is clipped or none of it.
    """

    name: Literal["gspo"] = "gspo"
    """Which algorithm trains; each has settings of its own."""
    aggregation: Aggregation = "sequence_mean"
    """How token losses become one loss; the paper's is the mean over sequences."""
    epsilon: float = Field(3e-4, gt=0)
    """How far a sequence's ratio may fall below 1; the paper's (section 5.1)."""
    epsilon_high: float = Field(4e-4, gt=0)
    """How far a sequence's ratio may rise above 1; the paper's (section 5.1)."""

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """Return, at each token of sequence i, - min(s_i A_t, clip(s_i) A_t) (eq. 5).

        With s_i = (pi_theta(y_i) / pi_behav(y_i))^(1 / |y_i|), the geometric mean of the token
        ratios (eq. 7). Masked tokens are in neither product nor |y_i|: y_i is what is trained of
        the sequence.
        """
        sequence_T = inputs.sequence_T
        log_ratio_S = sequence_means(inputs.logprobs_T - inputs.behavior_logprobs_T, sequence_T)
        ratio_T = bounded_exp(log_ratio_S)[sequence_T]
        surrogate_T, clipped_T = clipped_surrogate(
            ratio_T, inputs, low=self.epsilon, high=self.epsilon_high
        )
        metrics = _metrics("sequence_ratio", ratio_T, clipped_T, log_ratio_S[sequence_T])
        return PolicyLoss(-surrogate_T, metrics, clipped_T)


def clipped_surrogate(
    ratio_T: Tensor, inputs: LossInputs, *, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Return min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347, eq. 7).

    With it comes where the clip ended the gradient: where the ratio left its range to the
    advantage's side.
    """
    whole_T = ratio_T * inputs.advantages_T
    clipped_T = ratio_T.clamp(1 - low, 1 + high) * inputs.advantages_T
    return whole_T.minimum(clipped_T), (clipped_T < whole_T).detach()


def _metrics(
    name: str, ratio_T: Tensor, clipped_T: Tensor, *log_ratios_T: Tensor
) -> dict[str, Metric]:
    """Return what to watch of a loss, with the ratio that `name` names."""
    return {
        "clip_fraction": mean(clipped_T),
        f"{name}_mean": mean(ratio_T),
        f"{name}_max": maximum(ratio_T),
        "ratio_overflow_fraction": overflow_fraction(*log_ratios_T),
    }
