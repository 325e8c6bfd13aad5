"""Pass rates of an evaluation with their intervals, overall and by difficulty."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import sqrt
from typing import Any

from areal_flow.types import EvaluationTable, PassRate

Z_95 = 1.959963984540054


def tabulate(rows: Sequence[dict[str, Any]]) -> EvaluationTable:
    """Return the overall pass rate, and pass rate and mean length by difficulty."""
    by_difficulty: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_difficulty[row["difficulty"]].append(row)
    return EvaluationTable(
        overall=wilson_interval(_num_passed(rows), len(rows)),
        by_difficulty={
            difficulty: (
                wilson_interval(_num_passed(part), len(part)),
                sum(row["num_output_tokens"] for row in part) / len(part),
            )
            for difficulty, part in sorted(by_difficulty.items())
        },
    )


def wilson_interval(num_passed: int, n: int) -> PassRate:
    """Return the pass rate with Wilson's 95% score interval (Wilson 1927); all 0 when n is 0."""
    if n == 0:
        return PassRate(0.0, 0.0, 0.0, 0)
    rate = num_passed / n
    spread = 1 + Z_95**2 / n
    center = (rate + Z_95**2 / (2 * n)) / spread
    half = Z_95 / spread * sqrt(rate * (1 - rate) / n + Z_95**2 / (4 * n**2))
    return PassRate(rate, max(0.0, center - half), min(1.0, center + half), n)


def _num_passed(rows: Sequence[dict[str, Any]]) -> int:
    return sum((row["reward"] or 0.0) > 0 for row in rows)
