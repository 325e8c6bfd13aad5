"""Which rows count: all but those that a driver wrote after its run was taken over, as SQL.

A run that was never taken over from a driver that was alive has no fences and needs no condition.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from areal_flow.recovery.lease import read_fences
from areal_flow.store.dataset import COMMIT_ORDER


def trajectories_that_count(writers: Path) -> str | None:
    """Return the condition on trajectories, or None where all count."""
    return _all_of(
        f"(writer_epoch >= {fence.writer_epoch} OR {COMMIT_ORDER} < {fence.trajectory_watermark})"
        for fence in read_fences(writers)
    )


def evaluations_that_count(writers: Path) -> str | None:
    """Return the condition on held-out answers, or None where all count."""
    return _all_of(
        f"(writer_epoch >= {fence.writer_epoch} OR {COMMIT_ORDER} < {fence.evaluation_watermark})"
        for fence in read_fences(writers)
    )


def steps_that_count(writers: Path) -> str | None:
    """Return the condition on ledger rows, or None where all count."""
    return _all_of(
        f"(writer_epoch >= {fence.writer_epoch} OR step <= {fence.step})"
        for fence in read_fences(writers)
    )


def both(first: str | None, second: str | None) -> str | None:
    """Return a condition that holds where both do; None holds everywhere."""
    return _all_of(f"({condition})" for condition in (first, second) if condition)


def _all_of(conditions: Iterable[str]) -> str | None:
    return " AND ".join(conditions) or None
