"""An algorithm: its settings, and the parts of its loss.

A loss is an objective of a ratio (the algorithm's own), times an importance weight, plus what is
asked for beside it. Without a critic gamma = lambda = 1 and the reward sits on the final token, so
each token's return is the trajectory's reward. The micro-batches' losses add up to the minibatch's
whatever the packing.

With u = pi_theta / pi_prox, the ratio that an objective bounds, and w = pi_prox / pi_behav, the
importance weight beside it, w u is the whole distance from the policy that sampled. Letters: T
trained tokens of a micro-batch, S its sequences, B trajectories.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from areal_flow.algorithms.advantages import (
    GROUP_RELATIVE,
    batch_norm_advantages,
    overlong_penalties,
    rewards_are_equal,
)
from areal_flow.algorithms.logprobs import (
    MAX_LOG_RATIO,
    KLEstimator,
    at_bound,
    bounded_exp,
    kl_to_reference,
    overflow_fraction,
    sequence_means,
    suffix_sums,
)
from areal_flow.algorithms.protocol import (
    Advantage,
    AdvantageInputs,
    LossInputs,
    Metric,
    MinibatchSize,
    PolicyLoss,
    effective_sample_fraction,
    maximum,
    mean,
)
from areal_flow.core.settings import Settings, require

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
"""Over S sequences with N trained tokens: sum_t l_t / N, where long sequences weigh more; (1 / S)
sum_s mean_{t in s} l_t, where all weigh the same (GRPO, arXiv 2402.03300, eq. 3); or (1 / S) sum_t
l_t / C, where a length changes no token's weight (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
AdvantageRule = Literal["batch_norm", "grpo", "dr_grpo", "rloo", "reinforce_baseline", "none"]
Proximal = Literal["recomputed", "interpolated", "behavior"]
ImportanceWeightRule = Literal["full", "truncate", "mask", "mask_sequence"]


@dataclass(frozen=True, slots=True)
class Objective:
    """What an algorithm maximises at each token, and where a bound applies."""

    values_T: Tensor
    ratio_T: Tensor
    """The ratio that the objective bounds, for metrics."""
    low_T: Tensor
    """Where the bound below was reached."""
    high_T: Tensor
    """Where the bound above was."""
    ends_gradients: bool = True
    """Whether a token has no gradient there; False: only its weight is bounded."""


class ComposedAlgorithm(Settings):
    """Settings and parts of an algorithm; `objective` is its own."""

    needs_critic: ClassVar[bool] = False
    """Whether advantages are of values, which cost a model of their own."""
    needs_minibatch_bound: ClassVar[bool] = False
    """Whether the loss reads `minibatch_bound`, which costs a forward pass."""

    advantage: AdvantageRule = "dr_grpo"
    """How rewards become advantages: over the batch, or relative to the group; none: only the
    reference trains."""
    num_minibatches: int = Field(2, ge=1)
    """Optimizer updates per step."""
    group_filter: Literal["all", "mixed_rewards"] = "all"
    """Train all groups, or only those with different rewards."""
    aggregation: Aggregation = "token_mean"
    """Average token losses over tokens, over sequences, or divide their sum by a constant."""
    aggregation_tokens: int | None = Field(None, ge=1)
    """The constant, in tokens per sequence."""
    proximal: Proximal = "behavior"
    """The policy that the ratio is taken to: that before the step, recomputed, or interpolated
    between behaviour and trained policy by version; or behavior, that sampled the token."""
    importance_weight_rule: ImportanceWeightRule = "full"
    """Importance weights of the proximal over the behavior policy: `full`, truncated at the cap, or
    masked outside floor and cap, per token or per sequence (geometric mean)."""
    importance_weight_cap: float = Field(5.0, gt=1)
    """Upper bound of importance weights for all rules but `full`."""
    importance_weight_floor: float | None = Field(None, gt=0, lt=1)
    """Lower bound for the `mask` rules; none: mask only large weights."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Coefficient of the KL divergence from the reference."""
    reference: str = ""
    """Reference policy: a model directory or hub name, such as a teacher; empty: the initial policy
    of the run."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL divergence."""
    reference_top_k: int = Field(0, ge=0)
    """Likeliest tokens of the reference that the KL divergence is summed over in the place of each
    token, with all others as one; 0: it is estimated from the token itself."""
    kl_in: Literal["loss", "reward", "advantage"] = "loss"
    """Where to apply the KL divergence: in the loss, the rewards or the advantages."""
    overlong_tokens: tuple[int, int] | None = Field(None, strict=False)
    """Soft length penalty: completions longer than the first number lose reward, up to 1 at the
    second."""

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss reads `entropy_T`, whose gradient costs a copy of the logits."""
        return self.entropy_coefficient > 0

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss reads `proximal_logprobs_T`, which cost a forward pass."""
        return self.proximal == "recomputed"

    @property
    def needs_reference(self) -> bool:
        """Whether loss or advantages need a reference policy, which costs a pass."""
        return self.kl_coefficient > 0

    @property
    def needs_kl(self) -> bool:
        """Whether the advantages read `kl_N`, and so the loss no `reference_logprobs_T`."""
        return self.needs_reference and self.kl_in == "reward"

    @property
    def bound_needs_kl(self) -> bool:
        """Whether `minibatch_bound` reads the reference, which costs it a pass too."""
        return self.needs_minibatch_bound and self.needs_reference and self.kl_in == "advantage"

    @model_validator(mode="after")
    def _consistent(self) -> ComposedAlgorithm:
        require(
            (self.aggregation == "constant") == (self.aggregation_tokens is not None),
            f"algorithm.aggregation_tokens ({self.aggregation_tokens}) is needed when "
            f"algorithm.aggregation ({self.aggregation}) is 'constant', and only then",
        )
        require(
            self.importance_weight_rule == "full" or self.proximal != "behavior",
            f"algorithm.importance_weight_rule ({self.importance_weight_rule}) has nothing to "
            "correct when algorithm.proximal is 'behavior': the importance weight is 1, since the "
            "objective's own ratio is to the policy that sampled; set proximal to 'recomputed'",
        )
        require(
            self.importance_weight_floor is None
            or self.importance_weight_rule in ("mask", "mask_sequence"),
            f"algorithm.importance_weight_floor ({self.importance_weight_floor}) is of the rules "
            f"'mask' and 'mask_sequence', not of {self.importance_weight_rule!r}",
        )
        require(
            not self.reference_top_k or (self.kl_coefficient > 0 and self.kl_in == "loss"),
            f"algorithm.reference_top_k ({self.reference_top_k}) is of a divergence in the loss: "
            "set algorithm.kl_coefficient above 0 and algorithm.kl_in to 'loss'",
        )
        estimates = self.kl_coefficient > 0 and not self.reference_top_k
        require(
            not estimates or (self.kl_estimator, self.kl_in) != ("k1", "loss"),
            "algorithm.kl_estimator 'k1' as a loss has a gradient that is 0 on average, whatever "
            "the reference is; use 'k2' or 'k3', or set algorithm.kl_in to 'reward' or 'advantage'",
        )
        first, last = self.overlong_tokens or (0, 1)
        require(
            0 <= first < last,
            f"algorithm.overlong_tokens ({[first, last]}) must be two numbers, the larger last",
        )
        return self

    @model_validator(mode="after")
    def _has_something_to_learn(self) -> ComposedAlgorithm:
        require(
            not self.reference or self.kl_coefficient > 0,
            f"algorithm.reference ({self.reference}) is compared with nothing: set "
            "algorithm.kl_coefficient above 0",
        )
        require(
            self.advantage != "none" or bool(self.reference),
            "algorithm.advantage 'none' leaves nothing to learn without a teacher: set "
            "algorithm.reference and algorithm.kl_coefficient, or another advantage",
        )
        require(
            self.advantage != "none"
            or (self.group_filter == "all" and self.overlong_tokens is None),
            "algorithm.group_filter and algorithm.overlong_tokens are of rewards, which "
            "algorithm.advantage 'none' does not train: leave them out, or set another advantage",
        )
        require(
            self.advantage != "none" or not self.needs_minibatch_bound,
            "algorithm.advantage 'none' gives this algorithm no sign to choose its tokens by: set "
            "algorithm.name to 'decoupled_ppo' or another one",
        )
        return self

    @property
    def compares_groups(self) -> bool:
        """Whether a group of one completion would teach nothing."""
        return self.advantage not in ("batch_norm", "none") or self.group_filter != "all"

    def keeps_group(self, rewards: Sequence[float]) -> bool:
        """Return whether a group of these rewards is trained; one that is not is discarded.

        Equal rewards give no group-relative advantage (DAPO, arXiv 2503.14476, section 3.2).
        """
        return self.group_filter == "all" or bool(rewards and not rewards_are_equal(rewards))

    def penalized_rewards(self, inputs: AdvantageInputs) -> Tensor:
        if self.overlong_tokens is None:
            return inputs.rewards_B
        first, last = self.overlong_tokens
        return inputs.rewards_B + overlong_penalties(inputs.num_tokens_B, first=first, last=last)

    def advantages(self, inputs: AdvantageInputs) -> Sequence[Advantage]:
        """Return each trajectory's advantage; where returns differ by token, one a token.

        A KL divergence K in the reward is in what is normalised. Relative to a group, that is the
        whole completion's return, r - beta sum_s K_s (RLOO, arXiv 2402.14740, section 3); over the
        batch, each token's, r - beta sum_{s >= t} K_s (REINFORCE++, arXiv 2501.03262, eqs. 8 to
        10).
        """
        rewards_B = self.penalized_rewards(inputs)
        assert inputs.kl_N is not None or not self.needs_kl, "a training step computes it"
        if self.advantage in GROUP_RELATIVE:
            returns_B = rewards_B - self.kl_coefficient * inputs.kl_sums
            advantages_B = GROUP_RELATIVE[self.advantage](returns_B, inputs.groups_B)
            return list(advantages_B.tolist())
        if self.advantage == "none":
            rewards_B = rewards_B.new_zeros(len(rewards_B))
        normalised = self.advantage == "batch_norm"
        normalise = batch_norm_advantages if normalised else lambda returns_N, _: returns_N
        if (kl_N := inputs.kl_N) is None:
            return list(normalise(rewards_B, inputs.num_trained_B).tolist())
        trajectory_N, beta = inputs.trajectories, self.kl_coefficient
        returns_N = rewards_B[trajectory_N] - beta * suffix_sums(kl_N, trajectory_N, len(rewards_B))
        return inputs.by_token(normalise(returns_N, returns_N.new_ones(len(returns_N))))

    @abstractmethod
    def objective(self, log_ratio_T: Tensor, inputs: LossInputs) -> Objective:
        """Return what is maximised, of u_t = exp(log_ratio_T) and the advantages."""

    def minibatch_bound(self, log_ratio_N: Tensor, advantages_N: Tensor) -> Tensor:
        """Return what `objective` needs of all N tokens of a minibatch, before its update.

        The ratios are to the policies that sampled the tokens. With kl_in = "advantage", the
        advantages are A_t - beta K_t, as in `loss`.
        """
        raise NotImplementedError

    def loss(self, inputs: LossInputs) -> PolicyLoss:
        """Return l_t = - w_t J_t - c H_t + beta K_t.

        J_t is the objective of u_t = pi_theta / pi_prox; w_t = pi_prox / pi_behav is the importance
        weight after its rule, H_t the policy's entropy, K_t the KL divergence from the reference,
        estimated or over buckets. A token that a rule leaves without gradient counts in the divisor
        all the same. With kl_in = "reward", K_t is in the advantages; with "advantage", J_t is of
        A_t - beta K_t, K_t of pi_prox. With a teacher as the reference and no other advantage it is
        on-policy distillation: by k1 in the advantage as Lu et al. have it (Thinking Machines,
        2025), or over buckets as in GKD (arXiv 2306.13649, section 3).
        """
        proximal_T = proximal_logprobs(inputs, self.proximal)
        kl_T = self._kl_to_reference(inputs, proximal_T)
        if kl_T is not None and self.kl_in == "advantage":
            inputs = replace(inputs, advantages_T=self.subtract_kl(inputs.advantages_T, kl_T))
        log_ratio_T = inputs.logprobs_T - proximal_T
        log_weight_T = proximal_T - inputs.behavior_logprobs_T
        objective = self.objective(log_ratio_T, inputs)
        weight_T = corrected_weights(
            log_weight_T,
            inputs,
            rule=self.importance_weight_rule,
            floor=self.importance_weight_floor,
            cap=self.importance_weight_cap,
        )
        losses_T = -(weight_T * objective.values_T)
        metrics = objective_metrics(objective)
        if self.proximal != "behavior":
            metrics |= weight_metrics(log_weight_T, weight_T)
        metrics["kl_policy_proximal"] = mean(bounded_exp(log_weight_T) * kl_from_older(log_ratio_T))
        metrics["ratio_overflow_fraction"] = overflow_fraction(log_ratio_T, log_weight_T)
        if self.entropy_coefficient and inputs.entropy_T is not None:
            losses_T = losses_T - self.entropy_coefficient * inputs.entropy_T
        if kl_T is not None:
            if self.kl_in == "loss":
                losses_T = losses_T + self.kl_coefficient * kl_T
            metrics["kl_policy_reference"] = mean(kl_T)
        ended_T = (
            objective.low_T | objective.high_T | at_bound(objective.ratio_T)
        ) & objective.ends_gradients
        return PolicyLoss(losses_T, metrics, ended_T | (weight_T == 0))

    def subtract_kl(self, advantages_T: Tensor, kl_T: Tensor) -> Tensor:
        return advantages_T - self.kl_coefficient * kl_T

    def _kl_to_reference(self, inputs: LossInputs, proximal_T: Tensor) -> Tensor | None:
        if not self.needs_reference or self.needs_kl:
            return None
        if self.reference_top_k:
            return kl_over_buckets(inputs)
        policy_T = inputs.logprobs_T if self.kl_in == "loss" else proximal_T
        assert inputs.reference_logprobs_T is not None, "a trainer gives them where they are needed"
        return kl_to_reference(policy_T, inputs.reference_logprobs_T, self.kl_estimator)

    def aggregate(
        self, losses_T: Tensor, sequence_T: Tensor, of: MinibatchSize, *, num_sequences: int
    ) -> Tensor:
        """Return what these tokens add to the minibatch's loss."""
        if self.aggregation_tokens is not None:
            return losses_T.sum() / (of.num_sequences * self.aggregation_tokens)
        if self.aggregation == "sequence_mean":
            return sequence_means(losses_T, sequence_T, num_sequences).sum() / of.num_sequences
        return losses_T.sum() / of.num_tokens


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
    compared_T = weight_T
    if rule == "mask_sequence":
        means_S = sequence_means(log_weight_T, inputs.sequence_T, inputs.num_sequences)
        compared_T = bounded_exp(means_S)[inputs.sequence_T]
    return weight_T.where((compared_T <= cap) & (compared_T >= (floor or 0.0)), 0.0)


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
