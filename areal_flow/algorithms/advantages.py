"""Advantages of a batch's trajectories from their rewards, and of tokens from a critic's values.

Letters: B trajectories of one step, T tokens of the longest, in N blocks of K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isclose
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

GAE_BLOCK = 64
"""Tokens whose estimates are one matrix product: more of them are more work, fewer more steps."""


def rewards_are_equal(rewards: Sequence[float]) -> bool:
    """Return whether rewards differ by rounding at most, as sums of the same parts may."""
    return isclose(min(rewards), max(rewards), rel_tol=1e-9, abs_tol=1e-9)


def batch_norm_advantages(rewards_B: Tensor, num_tokens_B: Tensor) -> Tensor:
    """Return (r - mean) / (std + 1e-6), moments over all tokens of the global batch.

    The paper's rewards of -5 and +5 with an epsilon of 1e-5 (AReaL, arXiv 2505.24298, section 6.1)
    are 10 (r - 0.5), of which this is the same.

    Args:
        rewards_B: float64, one reward a trajectory.
        num_tokens_B: completion tokens of each, which weight the moments; unbiased deviation.
    """
    num_tokens = num_tokens_B.sum()
    mean = (rewards_B * num_tokens_B).sum() / num_tokens
    squares = ((rewards_B - mean) ** 2 * num_tokens_B).sum()
    std = (squares / (num_tokens - 1).clamp(min=1)).sqrt()
    return (rewards_B - mean) / (std + 1e-6)


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


def reinforce_baseline_advantages(rewards_B: Tensor, groups_B: Tensor) -> Tensor:
    """Return (r - group mean) / (std of that over the batch + 1e-8), unbiased deviation.

    REINFORCE++ with a baseline (arXiv 2501.03262): the group gives the baseline and
    the batch the scale, so that a group of equal difficulty is not blown up by its small deviation.
    """
    centered_B = dr_grpo_advantages(rewards_B, groups_B)
    variance = (centered_B - centered_B.mean()).square().sum() / max(1, len(centered_B) - 1)
    return (centered_B - centered_B.mean()) / (variance.sqrt() + 1e-8)


def overlong_penalties(num_tokens_B: Tensor, *, first: int, last: int) -> Tensor:
    """Return 0 up to `first` tokens, a line down to -1 at `last` tokens, and -1 beyond.

    Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), where `last` is L_max and
    `last - first` is L_cache.
    """
    return -((num_tokens_B - first) / (last - first)).clamp(0.0, 1.0)


GROUP_RELATIVE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dr_grpo": dr_grpo_advantages,
    "grpo": grpo_advantages,
    "rloo": rloo_advantages,
    "reinforce_baseline": reinforce_baseline_advantages,
}


def _group_sums(values_B: Tensor, groups_B: Tensor) -> Tensor:
    _, group_B = groups_B.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    return values_B.new_zeros(len(values_B)).index_add_(0, group_B, values_B)[group_B]


def _group_sizes(values_B: Tensor, groups_B: Tensor) -> Tensor:
    return _group_sums(values_B.new_ones(len(values_B)), groups_B)


def gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    lengths_B: Tensor,
    *,
    discount: float = 1.0,
    gae_lambda: float = 0.95,
) -> Tensor:
    """Return generalised advantage estimates, `[B, T]` (Schulman et al., arXiv 1506.02438, eq. 16).

    A_t = d_t + g l A_{t+1} with d_t = r_t + g V_{t+1} - V_t, g the discount and l lambda; V and
    A are 0 after a trajectory's last token. In blocks of K tokens the recursion is one product with
    a triangular matrix, so that only T / K steps are one after the other.

    Args:
        lengths_B: tokens of each trajectory; entries beyond are ignored, and 0 in the result.
    """
    import torch  # here, since settings import this module, and are read without it

    num_tokens, decay = rewards_BT.shape[1], discount * gae_lambda
    last_B1 = (lengths_B[:, None] - 1).clamp(min=0)
    deltas_BT = rewards_BT - values_BT
    lasts_B1 = deltas_BT.gather(1, last_B1)
    deltas_BT[:, :-1].add_(values_BT[:, 1:], alpha=discount)
    deltas_BT.scatter_(1, last_B1, lasts_B1)
    # Of numpy: these are numbers of the host, whatever tensors without content are made beside it.
    positions_T = torch.from_numpy(np.arange(num_tokens))
    deltas_BT.masked_fill_(positions_T >= lengths_B[:, None], 0.0)
    blocks_BT = torch.nn.functional.pad(deltas_BT, (0, -num_tokens % GAE_BLOCK))
    steps_K = torch.from_numpy(np.arange(GAE_BLOCK, dtype=np.float64))
    powers_KK = (decay ** (steps_K[:, None] - steps_K).clamp(min=0)).tril()
    blocks_BNK = blocks_BT.view(len(rewards_BT), -1, GAE_BLOCK)
    estimates_BNK = blocks_BNK @ powers_KK.to(deltas_BT.dtype)
    carry_K = (decay ** (GAE_BLOCK - steps_K)).to(deltas_BT.dtype)
    after_B = estimates_BNK.new_zeros(len(rewards_BT))
    for block in range(estimates_BNK.shape[1] - 1, -1, -1):
        estimates_BNK[:, block].addcmul_(after_B[:, None], carry_K)
        after_B = estimates_BNK[:, block, 0]
    return estimates_BNK.flatten(1)[:, :num_tokens]
