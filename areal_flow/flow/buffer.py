"""Which committed groups a step trains, and which are discarded. Pure: receipts, never tokens.

Oldest submission first among complete groups; no group waits for an unfinished one.
"""

from __future__ import annotations

from itertools import chain

from areal_flow.algorithms.staleness import fresh_enough
from areal_flow.config import Recipe
from areal_flow.core.types import Discard, GroupReceipt, TrajectoryReceipt

Batch = tuple[TrajectoryReceipt, ...]
"""The trajectories of one step, in order."""


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

        A group without trainable members is not kept, and its slot is free.
        """
        assert group.submission_index not in self._groups, "a group was committed twice"
        unscored = [t for t in group.trajectories if t.reward is None]
        discards = [
            _discard(t, "workflow_error" if t.finish_reason == "error" else "verifier_error")
            for t in unscored
        ]
        scored = tuple(t for t in group.trajectories if t.reward is not None)
        if not self._keeps_group([t.reward for t in scored if t.reward is not None]):
            return discards + [_discard(t, "group_filter") for t in scored]
        self._groups[group.submission_index] = scored
        return discards + self._evict_from(group.submission_index, policy_version)

    def evict(self, *, policy_version: int) -> list[Discard]:
        """Drop every trajectory whose tokens are all too old to train `policy_version`."""
        evicted = (self._evict_from(index, policy_version) for index in list(self._groups))
        return [*chain.from_iterable(evicted)]

    def _evict_from(self, index: int, policy_version: int) -> list[Discard]:
        fresh: list[TrajectoryReceipt] = []
        stale: list[TrajectoryReceipt] = []
        for trajectory in self._groups[index]:
            is_fresh = fresh_enough(
                trajectory.newest_version,
                policy_version=policy_version,
                max_staleness=self.max_staleness,
            )
            (fresh if is_fresh else stale).append(trajectory)
        if fresh:
            self._groups[index] = tuple(fresh)
        else:
            del self._groups[index]
        return [_discard(trajectory, "stale") for trajectory in stale]

    def next_batch(self) -> Batch | None:
        """Return the oldest `groups_per_step` groups, or None while there are fewer.

        The order of the batch depends on submissions only, never on who finished first.
        """
        oldest = self._oldest()
        members = [t for index in oldest for t in self._groups[index]]
        return tuple(sorted(members, key=lambda t: t.trajectory_id)) or None

    def take(self) -> Batch | None:
        """Remove and return the next batch, or None while there is none."""
        batch = self.next_batch()
        for index in self._oldest():
            del self._groups[index]
        return batch

    def _oldest(self) -> list[int]:
        """Return the submission indices of the next batch, none while it is not complete."""
        if len(self._groups) < self.groups_per_step:
            return []
        return sorted(self._groups)[: self.groups_per_step]


def _discard(trajectory: TrajectoryReceipt, reason: str) -> Discard:
    return Discard(trajectory.trajectory_id, trajectory.num_tokens, reason)
