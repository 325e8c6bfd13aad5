"""Rows of the batch that comes next, read while a step runs; a step reads what was not.

| who           | waits for                            | unblocked by   |
|---------------|--------------------------------------|----------------|
| a step        | rows that are on their way           | that reading   |
| reading ahead | the step's reading of what it lacked | that reading   |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

Row = Mapping[str, Any]
ReadRows = Callable[[Sequence[str]], Sequence[Row]]
"""Returns the rows of trajectory ids, in their order, tokens as arrays."""


class RowsAhead:
    """A `ReadRows` that keeps at most one batch that was read ahead. Any thread; one reads."""

    def __init__(self, read: ReadRows) -> None:
        self._read = read
        self._reading = Lock()
        self._ahead: dict[str, Row] = {}

    def __call__(self, trajectory_ids: Sequence[str]) -> Sequence[Row]:
        with self._reading:
            missing = [i for i in trajectory_ids if i not in self._ahead]
            if missing:
                self._ahead.update(zip(missing, self._read(missing), strict=True))
            return [self._ahead.pop(identifier) for identifier in trajectory_ids]

    def read_ahead(self, trajectory_ids: Sequence[str]) -> None:
        """Read what the next step will likely ask for; rows read ahead before are forgotten."""
        with self._reading:
            self._ahead = {}
            self._ahead = dict(zip(trajectory_ids, self._read(trajectory_ids), strict=True))
