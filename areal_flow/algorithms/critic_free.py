"""What the algorithms without a critic share: advantages, aggregations of losses, their settings.

With gamma = lambda = 1 the reward sits on the final token, so each token's return is the
trajectory's reward. The micro-batches' losses add up to the minibatch's whatever the packing.
Letters: T trained tokens of a micro-batch, S its sequences, B trajectories of one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from areal_flow.algorithms.protocol import Advantage, AdvantageInputs, MinibatchSize
from areal_flow.settings import Settings, require

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


class CriticFree(Settings):
    """Settings and parts of an algorithm that needs no critic; `loss` is the algorithm's own."""

    advantage: Literal["batch_norm", "grpo", "dr_grpo", "rloo"] = "dr_grpo"
    """How rewards become advantages: normalised over the batch, or relative to the group."""
    reward_bias: float = -0.5
    """Added to each reward; for batch_norm."""
    reward_scale: float = Field(10.0, gt=0)
    """Multiplies each biased reward; for batch_norm."""
    num_minibatches: int = Field(2, ge=1)
    """Optimizer updates in a step; a group belongs to one of them."""
    group_filter: Literal["all", "mixed_rewards"] = "all"
    """Which groups are trained: all, or those whose rewards are not all equal."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one loss: mean over tokens, over sequences, or by a constant."""
    aggregation_tokens: int | None = Field(None, ge=1)
    """The constant, in tokens a sequence, that aggregation = "constant" divides by."""

    @property
    def needs_entropy(self) -> bool:
        return False

    @model_validator(mode="after")
    def _constant_is_given(self) -> CriticFree:
        require(
            (self.aggregation == "constant") == (self.aggregation_tokens is not None),
            f"algorithm.aggregation_tokens ({self.aggregation_tokens}) is needed when "
            f"algorithm.aggregation ({self.aggregation}) is 'constant', and only then",
        )
        return self

    def keeps_group(self, rewards: Sequence[float]) -> bool:
        """Return whether the group is trained.

        Equal rewards give no group-relative advantage (DAPO, arXiv 2503.14476, section 3.2).
        """
        return self.group_filter == "all" or len(set(rewards)) > 1

    def advantages(self, inputs: AdvantageInputs) -> Sequence[Advantage]:
        """Return one advantage a trajectory."""
        rewards_B = inputs.rewards_B
        if self.advantage == "batch_norm":
            bias, scale = self.reward_bias, self.reward_scale
            found_B = batch_norm_advantages(rewards_B, inputs.num_trained_B, bias=bias, scale=scale)
        else:
            found_B = GROUP_RELATIVE[self.advantage](rewards_B, inputs.groups_B)
        advantages: list[float] = found_B.tolist()
        return advantages

    def aggregate(self, losses_T: Tensor, sequence_T: Tensor, of: MinibatchSize) -> Tensor:
        """Return what these tokens add to the minibatch's loss.

        token_mean: sum_t l_t / N over the minibatch's N trained tokens; long sequences weigh more.
        sequence_mean: (1 / S) sum_s (1 / |s|) sum_{t in s} l_t, |s| counting the trained tokens of
        s; every sequence weighs the same, the objective of GRPO (arXiv 2402.03300, eq. 3).
        constant: (1 / S) sum_s sum_{t in s} l_t / C, with C = aggregation_tokens; a sequence's
        length changes no token's weight (Dr. GRPO, arXiv 2503.20783, section 3.2).
        """
        if self.aggregation_tokens is not None:
            return losses_T.sum() / (of.num_sequences * self.aggregation_tokens)
        if self.aggregation == "sequence_mean":
            return sequence_means(losses_T, sequence_T).sum() / of.num_sequences
        return losses_T.sum() / of.num_tokens


def sequence_means(values_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Return the mean of each sequence's values, `[S]`."""
    num_sequences = int(sequence_T[-1]) + 1 if sequence_T.numel() else 0
    zeros_S = values_T.new_zeros(num_sequences)
    lengths_S = zeros_S.index_add(0, sequence_T, values_T.new_ones(sequence_T.numel()))
    return zeros_S.index_add(0, sequence_T, values_T) / lengths_S.clamp(min=1)


def batch_norm_advantages(
    rewards_B: Tensor, num_tokens_B: Tensor, *, bias: float = -0.5, scale: float = 10.0
) -> Tensor:
    """Return (scale (r + bias) - mean) / (std + 1e-5), moments over all tokens of the global batch.

    With rewards of 0 and 1 the defaults give the paper's -5 and +5 (arXiv 2505.24298, section 6.1).

    Args:
        rewards_B: float64, one reward a trajectory.
        num_tokens_B: completion tokens of each, which weight the moments; unbiased deviation.
    """
    returns_B = scale * (rewards_B + bias)
    num_tokens = num_tokens_B.sum()
    mean = (returns_B * num_tokens_B).sum() / num_tokens
    squares = ((returns_B - mean) ** 2 * num_tokens_B).sum()
    std = (squares / (num_tokens - 1).clamp(min=1)).sqrt()
    return (returns_B - mean) / (std + 1e-5)


def dr_grpo_advantages(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """Return r minus the group's mean (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    return rewards_B - _group_sums(rewards_B, groups_B) / _group_sizes(rewards_B, groups_B)


def grpo_advantages(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """Return (r - group mean) / (group std + 1e-6), unbiased deviation (GRPO, arXiv 2402.03300).

    A group of one, or one whose rewards are all equal, has advantage 0.
    """
    centered_B = dr_grpo_advantages(rewards_B, groups_B)
    sizes_B = _group_sizes(rewards_B, groups_B)
    variance_B = _group_sums(centered_B**2, groups_B) / (sizes_B - 1).clamp(min=1)
    return centered_B / (variance_B.sqrt() + 1e-6)


def rloo_advantages(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """Return r minus the mean of the group's other members (RLOO, arXiv 2402.14740); alone, 0."""
    sizes_B = _group_sizes(rewards_B, groups_B)
    return dr_grpo_advantages(rewards_B, groups_B) * sizes_B / (sizes_B - 1).clamp(min=1)


GROUP_RELATIVE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dr_grpo": dr_grpo_advantages,
    "grpo": grpo_advantages,
    "rloo": rloo_advantages,
}


def _group_sums(values_B: Tensor, groups_B: Tensor) -> Tensor:
    _, group_B = groups_B.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    return values_B.new_zeros(len(values_B)).index_add_(0, group_B, values_B)[group_B]


def _group_sizes(values_B: Tensor, groups_B: Tensor) -> Tensor:
    return _group_sums(values_B.new_ones(len(values_B)), groups_B)
