"""GSPO: one ratio a sequence, so that a whole completion is clipped or none of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal_flow.algorithms.critic_free import Aggregation, CriticFree, sequence_means
from areal_flow.algorithms.protocol import LossInputs, PolicyLoss, maximum, mean
from areal_flow.algorithms.ratios import bounded_exp, clipped_surrogate, overflow_fraction


class GSPO(CriticFree):
    """Group sequence policy optimization (arXiv 2507.18071, section 4)."""

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
            ratio_T,
            inputs.advantages_T,
            epsilon_low=self.epsilon,
            epsilon_high=self.epsilon_high,
        )
        metrics = {
            "clip_fraction": mean(clipped_T),
            "sequence_ratio_mean": mean(ratio_T),
            "sequence_ratio_max": maximum(ratio_T),
            "ratio_overflow_fraction": overflow_fraction(log_ratio_S[sequence_T]),
        }
        return PolicyLoss(-surrogate_T, metrics, clipped_T)
