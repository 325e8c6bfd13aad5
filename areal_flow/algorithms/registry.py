"""The algorithms, by the name that recipes use. The next one is a class, a name here and its tests.

PPO in its forms, and GSPO, end the gradient where a clip ends a ratio: they differ in the policy
that the ratio is taken to, and in whether tokens or sequences have one. CISPO, SAPO, DPPO and M2PO
bound what a token counts for by other rules.

Letters: T trained tokens of a micro-batch, S its sequences, N trained tokens of a minibatch, B
trajectories of a step, L tokens of the longest completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from areal_flow.algorithms.advantages import gae
from areal_flow.algorithms.composed import (
    AdvantageRule,
    Aggregation,
    ComposedAlgorithm,
    Objective,
    Proximal,
)
from areal_flow.algorithms.logprobs import bounded_exp, sequence_means
from areal_flow.algorithms.protocol import Advantage, AdvantageInputs, LossInputs, PolicyLoss, mean
from areal_flow.core.settings import Settings, require, unnamed_is

if TYPE_CHECKING:
    from torch import Tensor

Temperature = Annotated[float, Field(gt=0)]

VALUE_CLIP = 0.2
"""How far a value may move in a step before its gradient ends; PPO's usual one."""


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
    unclipped_T = ratio_T * inputs.advantages_T
    clipped_T = ratio_T.clamp(1 - low, 1 + high) * inputs.advantages_T
    ended_T = (clipped_T < unclipped_T).detach()
    raised_T = inputs.advantages_T > 0
    return Objective(
        unclipped_T.minimum(clipped_T), ratio_T, ended_T & ~raised_T, ended_T & raised_T
    )


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


class CriticSettings(Settings):
    """The critic's own optimizer, and what its values are used for."""

    learning_rate: float = Field(1e-3, gt=0)
    """Learning rate of the critic (AdamW, constant)."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount factor gamma."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """GAE's lambda: 1 uses rewards only, 0 the next value only."""


class ActorCriticPPO(ClippedTokens):
    """PPO with generalised advantage estimates (arXiv 1707.06347, eq. 7; 1506.02438, eq. 16).

    The critic predicts the reward to come before each completion token. The reward is on the last
    token, and nothing comes after it: a truncated completion is not continued by its value. With
    kl_in = "reward" each trained token's reward is less by beta K_t. Tokens that are context only
    count in the estimates, and train neither policy nor critic.
    """

    needs_critic: ClassVar[bool] = True
    name: Literal["ppo_critic"] = "ppo_critic"
    """The algorithm; each has its own settings and defaults."""
    advantage: Literal["gae"] = "gae"  # type: ignore[assignment]
    """Of the critic's values; normalised over the trained tokens of the batch."""
    proximal: Proximal = "recomputed"
    """The policy that the ratio is taken to; see `decoupled_ppo` and `ppo`."""
    critic: CriticSettings = CriticSettings()
    """The value model."""

    @property
    def compares_groups(self) -> bool:
        return self.group_filter != "all"

    def advantages(self, inputs: AdvantageInputs) -> Sequence[Advantage]:
        """Return each trajectory's estimates, with mean 0 and deviation 1 over trained tokens."""
        estimates_BL = self._estimates(inputs)
        trained_N = estimates_BL[inputs.padded_trained]
        centre = trained_N.mean() if len(trained_N) else 0.0
        scale = trained_N.std() if len(trained_N) > 1 else 1.0
        normal_BL = (estimates_BL - centre) / (scale + 1e-8)
        lengths = inputs.num_tokens_B.long().tolist()
        rows = zip(normal_BL, lengths, strict=True)
        return [row_L[:length].numpy().copy() for row_L, length in rows]

    def value_targets(self, inputs: AdvantageInputs) -> Tensor:
        """Return what the critic is to predict: estimates plus values, padded `[B, L]`."""
        assert inputs.values_BL is not None
        return self._estimates(inputs) + inputs.values_BL

    def value_loss(self, values_T: Tensor, old_T: Tensor, targets_T: Tensor) -> PolicyLoss:
        """Return max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2, as PPO2 has it.

        (OpenAI baselines, `ppo2`; Engstrom et al., arXiv 2005.12729, section 3.)

        Args:
            values_T: v, of the critic as it is now.
            old_T: v_old, of the critic before the step.
            targets_T: R.
        """
        moved_T = values_T - old_T
        near_T = old_T + moved_T.clamp(-VALUE_CLIP, VALUE_CLIP)
        free_T, clipped_T = (values_T - targets_T).square(), (near_T - targets_T).square()
        # Rounding alone makes v_old + (v - v_old) another number than v.
        ended_T = ((moved_T.abs() > VALUE_CLIP) & (clipped_T > free_T)).detach()
        metrics = {
            "critic_loss": mean(free_T / 2),
            "critic_clip_fraction": mean(ended_T),
            "critic_value_mean": mean(old_T),
        }
        return PolicyLoss(free_T.maximum(clipped_T) / 2, metrics)

    def _estimates(self, inputs: AdvantageInputs) -> Tensor:
        assert inputs.values_BL is not None, "a trainer gives them to an algorithm with a critic"
        lengths_B = inputs.num_tokens_B.long()
        rewards_B = self.penalized_rewards(inputs)
        rewards_BL = inputs.values_BL.new_zeros(inputs.values_BL.shape)
        rewards_BL.scatter_(1, (lengths_B[:, None] - 1).clamp(min=0), rewards_B[:, None])
        if inputs.kl_N is not None:
            rewards_BL[inputs.padded_trained] -= self.kl_coefficient * inputs.kl_N
        discount, gae_lambda = self.critic.discount, self.critic.gae_lambda
        return gae(
            rewards_BL, inputs.values_BL, lengths_B, discount=discount, gae_lambda=gae_lambda
        )


AnyAlgorithm = (
    DecoupledPPO | PPO | GSPO | CISPO | SAPO | M2PO | DPPO | ReinforcePlusPlus | ActorCriticPPO
)

ALGORITHMS = {
    algorithm.model_fields["name"].default: algorithm for algorithm in get_args(AnyAlgorithm)
}

AlgorithmSettings = Annotated[
    AnyAlgorithm, Field(discriminator="name"), unnamed_is("decoupled_ppo")
]
"""What a recipe's `[algorithm]` accepts: the settings of the algorithm that it names, no others."""
