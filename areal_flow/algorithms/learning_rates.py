"""The learning rate of each optimizer step: a warm-up, then a schedule down to a floor. Pure."""

from __future__ import annotations

from math import cos, pi
from typing import Literal

RateSchedule = Literal["constant", "linear", "cosine"]
FLOOR = 0.03
"""Of the peak: where the schedules that decay end, and stay."""


def scheduled_rate(
    peak: float, *, step: int, schedule: RateSchedule, num_warmup_steps: int, num_decay_steps: int
) -> float:
    """Return the rate of step t = 1, 2, ... with a warm-up of W steps and a decay until step D.

    `peak * t / (W + 1)` in the warm-up; then, with the progress `p = (t - 1 - W) / (D - W)`, at
    most 1, `peak * (FLOOR + (1 - FLOOR) * f(p))`, where f is 1 (constant), `1 - p` (linear) or
    `(1 + cos(pi * p)) / 2` (cosine; Loshchilov and Hutter, arXiv 1608.03983, equation 5).

    Args:
        num_decay_steps: D, the warm-up included; every later step has the floor.
    """
    after_warmup = step - 1 - num_warmup_steps
    if after_warmup < 0:
        return peak * (step / (num_warmup_steps + 1))
    if schedule == "constant":
        return peak
    progress = min(1.0, after_warmup / max(1, num_decay_steps - num_warmup_steps))
    left = 1 - progress if schedule == "linear" else 0.5 * (1 + cos(pi * progress))
    return peak * (FLOOR + (1 - FLOOR) * left)
