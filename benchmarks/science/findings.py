"""The result of an experiment: estimates with intervals over seeds, and conclusions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.stats import t as student_t

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, and half the width of its 95% interval by Student's t."""

    mean: float
    half: float

    @staticmethod
    def of(values: Sequence[float]) -> Estimate:
        """With a single value the interval is infinite."""
        n = len(values)
        if n < 2:
            return Estimate(fmean(values), float("inf"))
        quantile = float(student_t.ppf((1 + CONFIDENCE) / 2, n - 1))
        return Estimate(fmean(values), quantile * stdev(values) / sqrt(n))

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def text(self, num_decimals: int = 3, scale: float = 1.0) -> str:
        """Return the mean with its interval, which a single value does not have."""
        mean, half = self.mean * scale, self.half * scale
        interval = f" ± {half:,.{num_decimals}f}" if isfinite(half) else ""
        return f"{mean:,.{num_decimals}f}{interval}"


def difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return the mean paired difference, second minus first; both have the same seeds in order."""
    return Estimate.of([b - a for a, b in zip(first, second, strict=True)])


def conclude(what: str, estimate: Estimate, *, nothing: float = 0.0, num_decimals: int = 3) -> str:
    """Return the conclusion from an interval: the direction of the effect, or none.

    Args:
        nothing: the value of no effect: 0 of a difference, 1 of a ratio.
    """
    sign = "" if nothing else "+"
    if not isfinite(estimate.half):
        return f"{what}: {estimate.mean:{sign}.{num_decimals}f}. **No conclusion**: one seed."
    mean, low, high = (
        f"{each:{sign}.{num_decimals}f}" for each in (estimate.mean, estimate.low, estimate.high)
    )
    interval = f"{mean} (95%: {low} to {high})"
    if estimate.low <= nothing <= estimate.high:
        return f"{what}: {interval}. **No conclusion**: the interval includes {nothing:g}."
    return f"{what}: **{interval}**."


@dataclass(frozen=True, slots=True)
class Finding:
    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    """Rows by title; a row's keys are the columns."""
    conclusions: Sequence[str]
    draw: Callable[[Path], None]
    """Writes the plot."""
