"""Decides how many generators a run needs so that neither side waits for the other. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from areal_flow.flow.bottleneck import speed_shares
from areal_flow.log.ledger_row import OBSERVED

WINDOW_STEPS = 5
"""A decision is made from so many steps with one number of generators."""
SETTLING_STEPS = 2
"""Steps after a change that are not counted: their batches were generated before it."""
TOLERANCE = 0.25
"""Of a generator: less than this is not worth a change."""


class Balance:
    """Follows the steps of a run, and returns the number of generators that would suit them.

    The demand is how many generators would be busy all the time if the trainer never waited:

        demand = n * busy * step_s / (step_s - wait_s)

    With too few generators they are all busy and the trainer waits; with too many they idle.
    """

    def __init__(
        self, min_number: int, max_number: int, *, window_steps: int = WINDOW_STEPS
    ) -> None:
        self.min_number, self.max_number = min_number, max_number
        self._window_steps = window_steps
        self._rows: list[Mapping[str, Any]] = []
        self._number = 0

    def window(self, row: Mapping[str, Any], *, number: int) -> list[Mapping[str, Any]]:
        """Take in a step's row of the ledger; return those of a window that it completes."""
        if number != self._number:
            self._number, self._rows = number, []
        self._rows.append(row)
        counted = self._rows[SETTLING_STEPS:]
        if len(counted) < self._window_steps:
            return []
        self._rows = []
        return counted

    def target_number(self, rows: Sequence[Mapping[str, Any]], *, number: int) -> int:
        """Return the number of generators to have, by the rows of a window."""
        demand = generators_demanded(rows, number=number)
        if demand > number + TOLERANCE:  # at most twice as many: far from balance it is a guess
            target = min(ceil(demand - TOLERANCE), 2 * number)
        else:
            target = min(ceil(demand + TOLERANCE), number)
        return max(self.min_number, min(target, self.max_number))


def generators_demanded(rows: Sequence[Mapping[str, Any]], *, number: int) -> float:
    steps = [{**row["metrics"], **row} for row in rows]
    if not any(step.get(OBSERVED) for step in steps):  # nothing was generated meanwhile
        return float(number)
    waiting, busy, _ = speed_shares(steps, num_generators=number)
    return number * busy / max(1 - waiting, 0.01)
