"""What the algorithms without a critic share: advantages from rewards alone, and their settings.

With gamma = lambda = 1 the reward sits on the final token, so each token's return is the
trajectory's reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from areal_flow.algorithms.aggregation import Aggregation, constant, sequence_mean, token_mean
from areal_flow.algorithms.protocol import Advantage, AdvantageInputs, MinibatchSize
from areal_flow.settings import Settings, require

if TYPE_CHECKING:
    from torch import Tensor


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
        from areal_flow.algorithms.advantages import GROUP_RELATIVE, batch_norm_advantages

        if self.advantage != "batch_norm":
            found_B = GROUP_RELATIVE[self.advantage](inputs.rewards_B, inputs.groups_B)
        else:
            found_B = batch_norm_advantages(
                inputs.rewards_B,
                inputs.num_trained_B,
                bias=self.reward_bias,
                scale=self.reward_scale,
            )
        advantages: list[float] = found_B.tolist()
        return advantages

    def aggregate(self, losses_T: Tensor, sequence_T: Tensor, of: MinibatchSize) -> Tensor:
        """Return what these tokens add to the minibatch's loss."""
        if self.aggregation_tokens is not None:
            return constant(losses_T, of, num_tokens=self.aggregation_tokens)
        if self.aggregation == "sequence_mean":
            return sequence_mean(losses_T, sequence_T, of)
        return token_mean(losses_T, of)
