"""Says once a run that its rollout engine computes other probabilities than its trainer.

Runs whose engine and trainer disagree learn from data of another policy than they think, and may
collapse after some hundred steps although nothing is stale.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from areal_flow.core.step_metrics import ENGINE_GAP

logger = logging.getLogger(__name__)

MAX_MEAN_DIFFERENCE = 0.05
"""Nats a token: bfloat16 on both sides makes about 0.02, float32 below 1e-4."""
MAX_KL = 0.01
"""Nats a token; a few tokens that differ much make it large while the mean stays small."""
LEAST_TOKENS = 100
"""Fewer say little."""
REMEDIES = (
    "in this order: give generation.dtype and trainer.dtype the same value, which is the head's "
    "too; leave generation.vllm.quantization (fp8) out; set generation.batch_invariant for "
    "batch-invariant kernels; correct the objective: algorithm.proximal = 'recomputed' with "
    "algorithm.importance_weight_rule = 'truncate' (TIS), or 'mask' with a floor (IcePop)"
)


def is_wide(metrics: Mapping[str, Any]) -> bool:
    """Return whether a step's metrics show a gap beyond the bounds."""
    if (metrics.get(f"{ENGINE_GAP}tokens") or 0) < LEAST_TOKENS:
        return False
    difference = metrics[f"{ENGINE_GAP}logprob_difference_mean"]
    return bool(difference > MAX_MEAN_DIFFERENCE or metrics[f"{ENGINE_GAP}kl"] > MAX_KL)


def gap_warning(metrics: Mapping[str, Any], *, step: int) -> str:
    difference = metrics[f"{ENGINE_GAP}logprob_difference_mean"]
    return (
        f"step {step}: engine and trainer give the same tokens other log-probabilities with the "
        f"same weights, by {difference:.3g} in the mean and a KL divergence of "
        f"{metrics[f'{ENGINE_GAP}kl']:.3g} (expected at most {MAX_MEAN_DIFFERENCE:g} and "
        f"{MAX_KL:g}): {REMEDIES}"
    )


class GapWatch:
    """Logs a warning at the first step of a run whose gap is wide."""

    def __init__(self, recorded: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """Take what returns the ledger's rows: a resumed run has warned already."""
        self._recorded = recorded
        self._is_known = False

    def count(self, row: Mapping[str, Any]) -> None:
        if self._is_known or not is_wide(row["metrics"]):
            return
        self._is_known = True
        earlier = (each for each in self._recorded() if each["step"] < row["step"])
        if not any(is_wide(each["metrics"]) for each in earlier):
            logger.warning(gap_warning(row["metrics"], step=row["step"]))
