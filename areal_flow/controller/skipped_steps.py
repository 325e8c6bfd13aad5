"""Ends a run whose steps go on changing nothing. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from areal_flow.errors import TrainingError


@dataclass
class SkippedSteps:
    """How many steps in a row had an update whose loss or gradient was not finite."""

    max_in_a_row: int
    _num_in_a_row: int = 0

    def count(self, step: int, *, skipped: bool) -> None:
        """Count a step.

        Raises:
            TrainingError: it is one too many.
        """
        self._num_in_a_row = self._num_in_a_row + 1 if skipped else 0
        if self._num_in_a_row >= self.max_in_a_row:
            raise TrainingError(
                f"expected a finite loss and gradient, found {self._num_in_a_row} steps in a row, "
                f"the last one {step}, with an update that was skipped for want of them "
                "(trainer.adamw.max_skipped_steps): start a new run with a lower learning rate"
            )
