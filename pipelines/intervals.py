"""Counts in, a rate with its interval out."""

from __future__ import annotations

from math import sqrt

from areal_flow.types import PassRate

Z_95 = 1.959963984540054


def wilson_interval(num_passed: int, n: int) -> PassRate:
    """Return the pass rate with Wilson's 95% score interval (Wilson 1927); all 0 when n is 0."""
    if n == 0:
        return PassRate(0.0, 0.0, 0.0, 0)
    rate = num_passed / n
    spread = 1 + Z_95**2 / n
    center = (rate + Z_95**2 / (2 * n)) / spread
    half = Z_95 / spread * sqrt(rate * (1 - rate) / n + Z_95**2 / (4 * n**2))
    return PassRate(rate, max(0.0, center - half), min(1.0, center + half), n)
