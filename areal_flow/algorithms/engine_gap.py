"""How far a rollout engine's log-probabilities are from the trainer's, with the same weights.

Only trained tokens count that the policy before the step sampled itself: none of their gap is
staleness, all of it is numerics. Letters: T trained tokens of a micro-batch, K sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from areal_flow.algorithms.composed import kl_to_reference
from areal_flow.core.types import ENGINE_GAP

if TYPE_CHECKING:
    from torch import Tensor

NUM_MOMENTS = 8
BINS_PER_DECADE = 20
"""A percentile is right within a bin, whose ends differ by 12%."""
FIRST_DECADE, LAST_DECADE = -8, 2
NUM_BINS = (LAST_DECADE - FIRST_DECADE) * BINS_PER_DECADE
"""Of |difference|, in powers of ten; the first one has all that is smaller, the last what is
larger."""
PERCENTILE = 0.99


def zero_gap_sums(ranks: Iterable[int], device: str) -> dict[int, Tensor]:
    """Return zeros, to which each rank adds the sums of its micro-batches."""
    import torch  # here: recipes are read without torch

    shape = NUM_MOMENTS + NUM_BINS
    return {rank: torch.zeros(shape, dtype=torch.float64, device=device) for rank in ranks}


def gap_sums(trainer_T: Tensor, engine_T: Tensor, fresh_T: Tensor) -> Tensor:
    """Return sums that add up over tokens, float64: of moments, then how many are in each bin.

    Args:
        fresh_T: which tokens count; those whose difference is not finite do not.
    """
    trainer_T, engine_T = trainer_T.double(), engine_T.double()
    counted_T = fresh_T & (trainer_T - engine_T).isfinite()
    trainer_T, engine_T = trainer_T.where(counted_T, 0.0), engine_T.where(counted_T, 0.0)
    difference_T = (trainer_T - engine_T).abs()
    p_T, q_T = trainer_T.exp(), engine_T.exp()
    kl_T = kl_to_reference(engine_T, trainer_T, "k3")
    ones_T = p_T.new_ones(len(p_T))
    values = ones_T, difference_T, kl_T, p_T, q_T, p_T.square(), q_T.square(), p_T * q_T
    place_T = (difference_T.log10() - FIRST_DECADE) * BINS_PER_DECADE
    sums_K = p_T.new_zeros(NUM_MOMENTS + NUM_BINS)
    for index, values_T in enumerate(values):
        sums_K[index] = values_T.where(counted_T, 0.0).sum()
    bins_T = place_T.clamp(0, NUM_BINS - 1).long()
    return sums_K.index_add_(0, NUM_MOMENTS + bins_T, counted_T.double())


def gap_metrics(sums_K: Tensor) -> dict[str, float]:
    """Return the metrics of all tokens that `gap_sums` counted; none without a token.

    The KL divergence of the trainer's policy from the engine's is estimated by k3, w - 1 - log w
    with w the trainer's probability over the engine's (J. Schulman, "Approximating KL divergence",
    2020). The correlation (Pearson's, of the probabilities) is left out where they are all equal.
    """
    sums = sums_K.tolist()  # the one place that waits for the device
    number = sums[0]
    if not number:
        return {}
    difference, kl, p, q, pp, qq, pq = (each / number for each in sums[1:NUM_MOMENTS])
    metrics = {
        "tokens": number,
        "logprob_difference_mean": difference,
        "logprob_difference_p99": _percentile(np.array(sums[NUM_MOMENTS:])),
        "kl": kl,
    }
    variances = pp - p * p, qq - q * q
    if min(variances) > 1e-12 * max(pp, qq):
        correlation = (pq - p * q) / (variances[0] * variances[1]) ** 0.5
        metrics["probability_correlation"] = min(1.0, correlation)
    return {f"{ENGINE_GAP}{name}": value for name, value in metrics.items()}


def _percentile(counts: np.ndarray) -> float:
    """Return `PERCENTILE` of what is in the bins, as if it were even in each, on a log scale."""
    below = np.concatenate([[0.0], counts.cumsum()])
    target = PERCENTILE * below[-1]
    index = int(np.searchsorted(below[1:], target))
    share = (target - below[index]) / counts[index]
    if index == 0:
        return float(share * 10.0 ** (FIRST_DECADE + 1 / BINS_PER_DECADE))
    return float(10.0 ** (FIRST_DECADE + (index + share) / BINS_PER_DECADE))
