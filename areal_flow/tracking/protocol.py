"""What a sink must do to show a run: the numbers come from the ledger, and twice is as once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from areal_flow.tracking.description import RunDescription

TRAINED_AT_TAG = "trained_at"
"""Of a registered version: when the ledger had its step, as text that sorts by time."""
PASS_RATE_TAG = "held_out_pass_rate"
"""Of a registered version: what its newest held-out evaluation found, if there was one."""
BATCH_PASS_RATE_TAG = "rollout_pass_rate"
"""Of a registered version: that of the batch of which it was made."""


class Tracker(Protocol):
    """One sink of one run. One thread calls it; it may block, and raise while it cannot be reached.

    Whatever was delivered may be delivered again after a crash: the result must be the same.
    """

    model_version: str | None
    """The registered version of the newest checkpoint, once there is one."""
    alias: str | None
    """The run's own alias, which follows that version."""

    def begin(self) -> int:
        """Find this run in the sink, or make it there; return the last step delivered, or 0."""

    def describe(self, description: RunDescription) -> None:
        """Show what the run is; parameters that are there already stay, all else is replaced."""

    def show_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show a table of sample answers, instead of the one shown before."""

    def log_step(self, step: int, metrics: Mapping[str, float], *, timestamp_ms: int) -> None:
        """Log the numbers of a step, then remember the step as delivered."""

    def log_evaluation(
        self, policy_version: int, metrics: Mapping[str, float], *, timestamp_ms: int
    ) -> None:
        """Log what was measured of a policy outside its training."""

    def register_checkpoints(self, present: Mapping[Path, Mapping[str, str]]) -> None:
        """Register these checkpoints, without a copy, and no others of this run.

        The newest gets the run's alias. `best` goes to the highest pass rate of all runs.

        Args:
            present: the tags of each directory, ascending by step. Those of a registered one may
                have changed.
        """

    def protected(self) -> frozenset[Path]:
        """Return the checkpoints that must not be pruned: those with `best`, or a user's alias."""

    def remove(self) -> int:
        """Remove the run with its versions and their aliases; return how many versions it had.

        A sink that never had the run is left as it is.
        """

    def is_reachable(self) -> bool:
        """Return whether the sink answers at all; asked after an error."""

    def end(self, status: str) -> None:
        """Mark the run ended: FINISHED, which gives its newest version the alias `current`, KILLED
        or FAILED."""
