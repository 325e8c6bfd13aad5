"""Counter-based seeds: what a member samples follows from (run seed, submission, member) alone."""

from __future__ import annotations

from areal_flow.types import counter_seed


def member_seed(run_seed: int, submission_index: int, member: int) -> int:
    """Return a 63-bit seed, the same on every retry, on any generator and after any restart."""
    return counter_seed(run_seed, submission_index, member)


def group_seeds(run_seed: int, submission_index: int, group_size: int) -> tuple[int, ...]:
    """Return the seeds of a group's members."""
    return tuple(member_seed(run_seed, submission_index, m) for m in range(group_size))
