"""What a sink must do to show a run: the numbers come from the ledger, and twice is as once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """One sink of one run. One thread calls it; it may block, and raise while it cannot be reached.

    Whatever was delivered may be delivered again after a crash: the result must be the same.
    """

    model_version: str | None
    """The registered version of the newest checkpoint, once there is one."""

    def begin(self) -> int:
        """Find this run in the sink, or make it there; return the last step delivered, or 0."""
        ...

    def log_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Log the recipe, by dotted name; one that is there already stays."""
        ...

    def log_step(self, step: int, metrics: Mapping[str, float], *, timestamp_ms: int) -> None:
        """Log the numbers of a step, then remember the step as delivered."""
        ...

    def log_evaluation(
        self, policy_version: int, metrics: Mapping[str, float], *, timestamp_ms: int
    ) -> None:
        """Log what was measured of a policy outside its training."""
        ...

    def register_checkpoints(self, present: Mapping[Path, Mapping[str, str]]) -> None:
        """Register these checkpoints, without a copy, and no others of this run.

        Args:
            present: the tags of each directory, which say of which version of the trajectories it
                was made; ascending by step. The newest gets the alias `current`.
        """
        ...

    def protected(self) -> frozenset[Path]:
        """Return the checkpoints with an alias other than `current`: they must not be pruned."""
        ...

    def is_reachable(self) -> bool:
        """Return whether the sink answers at all; asked after an error."""
        ...

    def end(self, status: str) -> None:
        """Mark the run ended: FINISHED, KILLED or FAILED."""
        ...
