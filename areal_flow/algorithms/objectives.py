"""The algorithms that bound what a token counts for by another rule than a clipped ratio.

Letters: T trained tokens of a micro-batch, N those of a minibatch.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from areal_flow.algorithms.composed import AdvantageRule, Aggregation, ComposedAlgorithm, Objective
from areal_flow.algorithms.logprobs import bounded_exp
from areal_flow.algorithms.protocol import LossInputs
from areal_flow.core.settings import require

if TYPE_CHECKING:
    from torch import Tensor

Temperature = Annotated[float, Field(gt=0)]


class CISPO(ComposedAlgorithm):
    """Clipped importance-sampling policy optimization (MiniMax-M1, arXiv 2506.13585, eq. 4)."""

    name: Literal["cispo"] = "cispo"
    """The algorithm; each has its own settings."""
    advantage: AdvantageRule = "grpo"
    """How rewards become advantages; the paper's divides by the deviation of the group."""
    epsilon_low: float | None = Field(None, gt=0, lt=1)
    """The weight of a token is at least 1 minus this; none: at least 0."""
    epsilon_high: float = Field(0.28, gt=0)
    """How far the weight of a token may rise above 1; the paper names no value."""

    def objective(self, log_ratio_T: Tensor, inputs: LossInputs) -> Objective:
        """Return J_t = sg(clip(u_t, 1 - epsilon_low, 1 + epsilon_high)) A_t log pi_theta(y_t).

        With sg(...) without gradient: a clip bounds the weight of a token, and no token loses its
        gradient.
        """
        ratio_T = bounded_exp(log_ratio_T.detach())
        low = 1 - (self.epsilon_low or 1.0)
        weight_T = ratio_T.clamp(low, 1 + self.epsilon_high)
        values_T = weight_T * inputs.advantages_T * inputs.logprobs_T
        low_T, high_T = ratio_T < low, ratio_T > 1 + self.epsilon_high
        return Objective(values_T, ratio_T, low_T, high_T, ends_gradients=False)


class SAPO(ComposedAlgorithm):
    """Soft adaptive policy optimization (arXiv 2511.20347)."""

    name: Literal["sapo"] = "sapo"
    """The algorithm; each has its own settings."""
    advantage: AdvantageRule = "grpo"
    """How rewards become advantages; the paper's divides by the deviation of the group."""
    aggregation: Aggregation = "sequence_mean"
    """How token losses become one loss; the paper's is the mean over sequences."""
    temperatures: tuple[Temperature, Temperature] = Field((1.0, 1.05), strict=False)
    """How fast a ratio other than 1 fades the gradient of a positive and of a negative
    advantage."""

    def objective(self, log_ratio_T: Tensor, inputs: LossInputs) -> Objective:
        """Return J_t = (4 / tau) sigmoid(tau (u_t - 1)) A_t, tau by the sign of A_t.

        Its gradient is 4 p (1 - p) u_t A_t grad log pi_theta, with p the sigmoid: that of u_t A_t
        at u_t = 1, fading smoothly away from it, where a clip would end it.
        """
        ratio_T = bounded_exp(log_ratio_T)
        raised_T = inputs.advantages_T > 0
        positive, negative = self.temperatures
        tau_T = ratio_T.new_full((), positive).where(raised_T, negative)
        values_T = (tau_T * (ratio_T - 1)).sigmoid() * (4 / tau_T) * inputs.advantages_T
        never_T = raised_T & ~raised_T
        return Objective(values_T, ratio_T, never_T, never_T)


class RatioToBehavior(ComposedAlgorithm):
    """An algorithm whose trust region lies around the policies that sampled."""

    @model_validator(mode="after")
    def _ratio_is_to_behavior(self) -> RatioToBehavior:
        require(
            self.proximal == "behavior",
            f"algorithm.proximal ({self.proximal}) must be 'behavior' for this algorithm: it "
            "bounds the distance to the policy that sampled, and its ratio is to that one",
        )
        return self


class DPPO(RatioToBehavior):
    """Divergence PPO with the binary total variation (arXiv 2602.04879)."""

    name: Literal["dppo"] = "dppo"
    """The algorithm; each has its own settings."""
    max_divergence: float = Field(0.15, gt=0, lt=1)
    """How far a token's probability may move before its gradient ends (total variation)."""

    def objective(self, log_ratio_T: Tensor, inputs: LossInputs) -> Objective:
        """Return J_t = M_t r_t A_t with r_t = pi_theta / pi_behav.

        M_t = 0 where |pi_theta - pi_behav|, the total variation between "this token" and "another
        one", is above max_divergence and r_t left 1 to the advantage's side. A ratio says little of
        the distance: a rare token may double its probability and move nothing.
        """
        ratio_T = bounded_exp(log_ratio_T)
        moved_T = (inputs.logprobs_T.exp() - inputs.behavior_logprobs_T.exp()).detach()
        high_T = (inputs.advantages_T > 0) & (moved_T > self.max_divergence)
        low_T = (inputs.advantages_T < 0) & (moved_T < -self.max_divergence)
        values_T = (ratio_T * inputs.advantages_T).where(~(low_T | high_T), 0.0)
        return Objective(values_T, ratio_T, low_T, high_T)


class M2PO(RatioToBehavior):
    """Second-moment trust policy optimization (arXiv 2510.01161, section 5.2)."""

    needs_minibatch_bound: ClassVar[bool] = True
    name: Literal["m2po"] = "m2po"
    """The algorithm; each has its own settings."""
    advantage: AdvantageRule = "grpo"
    """How rewards become advantages; the paper's divides by the deviation of the group."""
    max_second_moment: float = Field(0.04, gt=0)
    """The greatest mean of squared log-ratios, over tokens that a clip could end."""

    def minibatch_bound(self, log_ratio_N: Tensor, advantages_N: Tensor) -> Tensor:
        """Return the size from which a log-ratio is masked (Algorithm 1).

        Of the tokens whose ratio left 1 to their advantage's side, those with the largest squares
        are left out until the mean of the others is at most max_second_moment. The bound lies
        halfway between the last one kept and the first one left out, so that the last bits of a
        log-ratio, which packing decides, do not decide the mask.
        """
        log_ratio_N = log_ratio_N.double()
        outward_N = _outward(log_ratio_N, advantages_N)
        sizes_N, _ = log_ratio_N.abs().where(outward_N, inf).sort()  # the others count as left out
        counts_N = _cumulative_sum(sizes_N.new_ones(len(sizes_N)))
        kept_N = _cumulative_sum(sizes_N.square()) / counts_N <= self.max_second_moment
        bounds = sizes_N.new_full((len(sizes_N) + 2,), inf)
        bounds[0], bounds[1:-1] = 0.0, sizes_N
        num_kept_1 = kept_N.sum(0, keepdim=True)  # a scalar as an index would be read on the host
        return (bounds[num_kept_1] + bounds[1:][num_kept_1])[0] / 2

    def objective(self, log_ratio_T: Tensor, inputs: LossInputs) -> Objective:
        """Return J_t = M_t r_t A_t (eq. 5), with r_t = pi_theta / pi_behav.

        M_t = 0 where |log r_t| reaches the minibatch's bound and r_t left 1 to the advantage's
        side. Without a minibatch these tokens are one.
        """
        ratio_T = bounded_exp(log_ratio_T)
        moved_T = log_ratio_T.detach()
        bound = inputs.minibatch_bound
        if bound is None:
            bound = self.minibatch_bound(moved_T, inputs.advantages_T)
        masked_T = _outward(moved_T, inputs.advantages_T) & (moved_T.abs() >= bound)
        values_T = (ratio_T * inputs.advantages_T).where(~masked_T, 0.0)
        return Objective(values_T, ratio_T, masked_T & (moved_T < 0), masked_T & (moved_T > 0))


def _cumulative_sum(values_N: Tensor) -> Tensor:
    """Return the sums of the first 1, 2, ... values, by doubling.

    CUDA's `cumsum` of floats has another order each time, and raises where bits must repeat.
    """
    shift = 1
    while shift < len(values_N):
        before_N, values_N = values_N, values_N.clone()
        values_N[shift:] += before_N[:-shift]
        shift *= 2
    return values_N


def _outward(log_ratio_T: Tensor, advantages_T: Tensor) -> Tensor:
    """Return where a ratio left 1 to the advantage's side, where alone a clip ends gradients."""
    return ((advantages_T > 0) & (log_ratio_T > 0)) | ((advantages_T < 0) & (log_ratio_T < 0))
