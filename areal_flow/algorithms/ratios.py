"""Probability ratios of two policies, and what clipping does with them.

Letters: T trained tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_flow.algorithms.protocol import Metric, mean

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp of it is 4.9e8. float32 overflows at 88, and the squares of a gradient's norm at 44."""


def bounded_exp(log_ratio_T: Tensor) -> Tensor:
    """Return exp(min(x, MAX_LOG_RATIO)), without gradient beyond the bound.

    An infinite log-ratio comes of damaged data. It stays infinite, so that the step is refused.
    """
    return log_ratio_T.where(~beyond_bound(log_ratio_T), MAX_LOG_RATIO).exp()


def beyond_bound(log_ratio_T: Tensor) -> Tensor:
    """Return where `bounded_exp` bounds a ratio."""
    return (log_ratio_T > MAX_LOG_RATIO) & log_ratio_T.isfinite()


def overflow_fraction(*log_ratios_T: Tensor) -> Metric:
    """Return, as a metric, the fraction of tokens with a ratio that was bounded."""
    bounded = [beyond_bound(log_ratio_T) for log_ratio_T in log_ratios_T]
    return mean(sum(bounded[1:], bounded[0]) > 0)


def clipped_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, *, epsilon_low: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """Return min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) (PPO, arXiv 1707.06347, eq. 7).

    With it comes where the clip ended the gradient: where the ratio left its range to the
    advantage's side.
    """
    whole_T = ratio_T * advantages_T
    clipped_T = ratio_T.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages_T
    return whole_T.minimum(clipped_T), (clipped_T < whole_T).detach()
