"""What an objective gives at each token, and what is watched of it and of importance weights.

Letters: T trained tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from areal_flow.algorithms.divergence import kl_from_older
from areal_flow.algorithms.logprobs import bounded_exp
from areal_flow.algorithms.protocol import Metric, effective_sample_fraction, maximum, mean

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Objective:
    """What an algorithm maximises at each token, and where it bounds that."""

    values_T: Tensor
    ratio_T: Tensor
    """The ratio that the objective bounds, to be watched."""
    low_T: Tensor
    """Where the bound below was reached."""
    high_T: Tensor
    """Where the bound above was."""
    ends_gradients: bool = True
    """Whether a token has no gradient there; False: only its weight is bounded."""


def objective_metrics(found: Objective) -> dict[str, Metric]:
    """Return what to watch of an objective and its ratio."""
    return {
        "clip_fraction": mean(found.low_T | found.high_T),
        "clip_low_fraction": mean(found.low_T),
        "clip_high_fraction": mean(found.high_T),
        "ratio_mean": mean(found.ratio_T),
        "ratio_max": maximum(found.ratio_T),
        "ratio_ess_fraction": effective_sample_fraction(found.ratio_T),
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
