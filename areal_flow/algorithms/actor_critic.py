"""PPO with a critic: each token's advantage is of values that a model of its own predicts.

Letters: B trajectories of a step, L tokens of the longest completion, T trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from areal_flow.algorithms.advantages import gae
from areal_flow.algorithms.clipped import ClippedTokens
from areal_flow.algorithms.composed import Proximal
from areal_flow.algorithms.protocol import Advantage, AdvantageInputs, PolicyLoss, mean
from areal_flow.core.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor


VALUE_CLIP = 0.2
"""How far a value may move in a step before its gradient ends; PPO's usual one."""


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
        return _by_trajectory(normal_BL, inputs)

    def value_targets(self, inputs: AdvantageInputs) -> Sequence[Advantage]:
        """Return what the critic is to predict: the estimates and the values, added up."""
        return _by_trajectory(self.targets(inputs), inputs)

    def targets(self, inputs: AdvantageInputs) -> Tensor:
        """Return the same as `[B, L]`, padded."""
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


def _by_trajectory(found_BL: Tensor, inputs: AdvantageInputs) -> list[Advantage]:
    lengths = inputs.num_tokens_B.long().tolist()
    return [row_L[:length].numpy().copy() for row_L, length in zip(found_BL, lengths, strict=True)]
