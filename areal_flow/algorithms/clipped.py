"""The algorithms whose gradient ends where a clipped ratio does: PPO in its forms, and GSPO.

They differ in the policy that the ratio is taken to, and in whether tokens or sequences have one.
Letters: T trained tokens of a micro-batch, S its sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from areal_flow.algorithms.composed import (
    AdvantageRule,
    Aggregation,
    ComposedAlgorithm,
    Objective,
    Proximal,
)
from areal_flow.algorithms.logprobs import bounded_exp, sequence_means
from areal_flow.algorithms.protocol import LossInputs
from areal_flow.core.settings import require

if TYPE_CHECKING:
    from torch import Tensor


class ClippedTokens(ComposedAlgorithm):
    """An algorithm that clips the ratio of each token."""

    epsilon: float = Field(0.2, gt=0)
    """The ratio is clipped at 1 minus this."""
    epsilon_high: float | None = Field(None, gt=0)
    """The ratio is clipped at 1 plus this; none: as epsilon."""
    dual_clip: float | None = Field(None, gt=1)
    """The ratio from which a token of negative advantage has no gradient; none: no limit."""

    @model_validator(mode="after")
    def _dual_clip_is_outside(self) -> ClippedTokens:
        high = 1 + (self.epsilon_high or self.epsilon)
        require(
            self.dual_clip is None or self.dual_clip > high,
            f"algorithm.dual_clip ({self.dual_clip}) must be above the clip's own end, {high}",
        )
        return self

    def objective(self, log_ratio_T: Tensor, inputs: LossInputs) -> Objective:
        """Return J_t = min(u_t A_t, clip(u_t, 1 - epsilon, 1 + epsilon_high) A_t).

        Unequal epsilons are DAPO's (arXiv 2503.14476, section 3.1). With dual_clip c, J_t is at
        least c A_t where A_t < 0 (Ye et al., arXiv 1912.09729, eq. 5): there min alone bounds the
        ratio from below only, and a token that became likely pulls without limit.
        """
        ratio_T = bounded_exp(log_ratio_T)
        high = self.epsilon_high or self.epsilon
        clipped = clipped_objective(ratio_T, inputs, low=self.epsilon, high=high)
        if self.dual_clip is None:
            return clipped
        floor_T = self.dual_clip * inputs.advantages_T
        ended_T = (inputs.advantages_T < 0) & (clipped.values_T < floor_T).detach()
        values_T = floor_T.where(ended_T, clipped.values_T)
        return Objective(values_T, ratio_T, clipped.low_T, clipped.high_T | ended_T)


class PPO(ClippedTokens):
    """PPO with a clipped surrogate (arXiv 1707.06347, eq. 7) and an entropy bonus (eq. 9).

    The ratio is to the policy that sampled. On stale data the clip counts the distance to it, which
    earlier steps have used up.
    """

    name: Literal["ppo"] = "ppo"
    """The algorithm; each has its own settings."""

    @model_validator(mode="after")
    def _is_not_decoupled(self) -> PPO:
        require(
            self.proximal == "behavior",
            f"algorithm.proximal ({self.proximal}) of 'ppo' can only be 'behavior': with another "
            "one it is decoupled PPO; set algorithm.name to 'decoupled_ppo'",
        )
        return self


class DecoupledPPO(ClippedTokens):
    """Decoupled PPO (AReaL, arXiv 2505.24298, eq. 5).

    The clip is centred on the policy before the step (proximal), and not on the older policies that
    sampled the tokens (behaviour): stale data is reweighted, not clipped away.
    """

    name: Literal["decoupled_ppo"] = "decoupled_ppo"
    """The algorithm; each has its own settings."""
    proximal: Proximal = "recomputed"
    """The policy before the step: recomputed by a forward pass, interpolated by version, or the one
    that sampled."""

    @model_validator(mode="after")
    def _is_decoupled(self) -> DecoupledPPO:
        require(
            self.proximal != "behavior",
            "algorithm.proximal of 'decoupled_ppo' cannot be 'behavior', which makes it plain PPO; "
            "set algorithm.name to 'ppo'",
        )
        return self


class ReinforcePlusPlus(ClippedTokens):
    """REINFORCE++ (arXiv 2501.03262): PPO's clip and no critic.

    Advantages are normalised over the batch and not within a group: by default of rewards minus
    their group's mean (its form with a baseline); `advantage = "batch_norm"` is the one without.
    """

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """The algorithm; each has its own settings."""
    advantage: Literal["batch_norm", "grpo", "dr_grpo", "rloo", "reinforce_baseline"] = (
        "reinforce_baseline"
    )
    """How rewards become advantages: normalised over the batch, with or without a baseline."""

    @model_validator(mode="after")
    def _normalises_over_the_batch(self) -> ReinforcePlusPlus:
        require(
            self.advantage in ("batch_norm", "reinforce_baseline"),
            f"algorithm.advantage ({self.advantage}) of 'reinforce_plus_plus' must normalise over "
            "the batch, 'reinforce_baseline' or 'batch_norm'; for others set algorithm.name to "
            "'ppo'",
        )
        return self


class GSPO(ComposedAlgorithm):
    """Group sequence policy optimization (arXiv 2507.18071, section 4).

    It has one ratio a sequence, so that a whole completion is clipped or none of it.
    """

    name: Literal["gspo"] = "gspo"
    """The algorithm; each has its own settings."""
    advantage: AdvantageRule = "grpo"
    """How rewards become advantages; the paper's divides by the deviation of the group."""
    aggregation: Aggregation = "sequence_mean"
    """How token losses become one loss; the paper's is the mean over sequences."""
    epsilon: float = Field(3e-4, gt=0)
    """How far a sequence's ratio may fall below 1; the paper's (section 5.1)."""
    epsilon_high: float = Field(4e-4, gt=0)
    """How far a sequence's ratio may rise above 1; the paper's (section 5.1)."""

    def objective(self, log_ratio_T: Tensor, inputs: LossInputs) -> Objective:
        """Return, at each token of sequence i, min(s_it A_t, clip(s_it) A_t) (GSPO-token, eq. 13).

        With s_it = sg(s_i) pi_theta(y_t) / sg(pi_theta(y_t)) and s_i = (pi_theta(y_i) /
        pi_prox(y_i))^(1 / |y_i|), the geometric mean of the token ratios (eq. 7). Where all of a
        sequence's tokens have one advantage and one weight, this is eq. 5, and so is its gradient;
        where they differ, each token's gradient is its own. Masked tokens are in neither product
        nor |y_i|: y_i is what is trained of the sequence.
        """
        of_T, num_sequences = inputs.sequence_T, inputs.num_sequences
        log_ratio_S = sequence_means(log_ratio_T.detach(), of_T, num_sequences)
        zero_T = inputs.logprobs_T - inputs.logprobs_T.detach()
        ratio_T = bounded_exp(log_ratio_S[of_T] + zero_T)
        return clipped_objective(ratio_T, inputs, low=self.epsilon, high=self.epsilon_high)


def clipped_objective(ratio_T: Tensor, inputs: LossInputs, *, low: float, high: float) -> Objective:
    """Return min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347, eq. 7).

    The clip ends the gradient where the ratio left its range to the advantage's side.
    """
    whole_T = ratio_T * inputs.advantages_T
    clipped_T = ratio_T.clamp(1 - low, 1 + high) * inputs.advantages_T
    ended_T = (clipped_T < whole_T).detach()
    raised_T = inputs.advantages_T > 0
    return Objective(whole_T.minimum(clipped_T), ratio_T, ended_T & ~raised_T, ended_T & raised_T)
