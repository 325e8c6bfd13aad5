"""Which committed groups a step trains, and which are discarded. Pure: receipts, never tokens.

Oldest submission first among the groups that are complete; nothing waits for a straggler.
"""

from __future__ import annotations

from areal_flow.algorithms.staleness import fresh_enough
from areal_flow.config import Recipe
from areal_flow.types import Discard, GroupReceipt, TrajectoryReceipt

Batch = tuple[TrajectoryReceipt, ...]
"""What one step will consume, in order."""


class Buffer:
    """Groups that are committed and neither trained nor discarded."""

    def __init__(self, recipe: Recipe) -> None:
        self.groups_per_step = recipe.groups_per_step
        self.max_staleness = recipe.controller.max_staleness
        self._keeps_group = recipe.algorithm.keeps_group
        self._groups: dict[int, Batch] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(t.num_tokens for group in self._groups.values() for t in group)

    def add(self, group: GroupReceipt, *, policy_version: int) -> list[Discard]:
        """Take in a committed group; return the members that will never be trained.

        When all of them come back, the group is not kept and its slot is free. Other groups are not
        looked at: what they may still train changes with the policy, see `evict`.
        """
        assert group.submission_index not in self._groups, "a group was committed twice"
        unscored = [t for t in group.trajectories if t.reward is None]
        discards = [_discard(t, "verifier_error") for t in unscored]
        scored = tuple(t for t in group.trajectories if t.reward is not None)
        if not self._keeps_group([t.reward for t in scored if t.reward is not None]):
            return discards + [_discard(t, "group_filter") for t in scored]
        return discards + self._keep_fresh(
            group.submission_index, scored, policy_version=policy_version
        )

    def evict(self, *, policy_version: int) -> list[Discard]:
        """Drop every trajectory whose tokens are all too old to train `policy_version`."""
        return [
            discard
            for index, group in list(self._groups.items())
            for discard in self._keep_fresh(index, group, policy_version=policy_version)
        ]

    def _keep_fresh(self, index: int, group: Batch, *, policy_version: int) -> list[Discard]:
        """Keep what may still train of one group, which is forgotten if nothing may."""
        stale = [t for t in group if not self._is_fresh(t, policy_version)]
        fresh = tuple(t for t in group if self._is_fresh(t, policy_version)) if stale else group
        if fresh:
            self._groups[index] = fresh
        else:
            self._groups.pop(index, None)
        return [_discard(t, "stale") for t in stale]

    def _is_fresh(self, trajectory: TrajectoryReceipt, policy_version: int) -> bool:
        return fresh_enough(
            trajectory.newest_version,
            policy_version=policy_version,
            max_staleness=self.max_staleness,
        )

    def take(self) -> Batch | None:
        """Remove and return the oldest `groups_per_step` groups, or None while there are fewer.

        The order of the batch depends on submissions only, never on who finished first.
        """
        if len(self._groups) < self.groups_per_step:
            return None
        oldest = sorted(self._groups)[: self.groups_per_step]
        members = [t for index in oldest for t in self._groups.pop(index)]
        return tuple(sorted(members, key=lambda t: t.trajectory_id))


def _discard(trajectory: TrajectoryReceipt, reason: str) -> Discard:
    return Discard(trajectory.trajectory_id, trajectory.num_tokens, reason)
