"""Decides where a resumed run goes on: from its settled past and what its logs say since. Pure.

Committed trajectories are trained, discarded or waiting; submissions are committed, given up or to
be submitted again under the same index, so with the same prompt, seeds and ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_flow.core.types import Discard, GroupReceipt, TrajectoryReceipt, submission_index_of
from areal_flow.flow.flow_setup import InitialState
from areal_flow.log.ledger_row import CommittedGroups, StepEntries, TokenAccounting
from areal_flow.log.settled import TOKEN_SUMS, SettledPast

PLAN_COLUMNS = ["weights_hash", "next_submission_index", "failed_submissions", *TOKEN_SUMS]


def plan_initial_state(
    past: SettledPast,
    ledger: Sequence[Mapping[str, Any]],
    unconsumed: Sequence[TrajectoryReceipt],
    committed: CommittedGroups,
    watermark: int,
) -> InitialState:
    """Return the state to go on from.

    Args:
        ledger: rows by step, of which those up to the past's step are not counted again.
        unconsumed: all trajectories that wait.
        committed: beyond the past's watermark.
        watermark: the number of trajectories in the log.
    """
    head, later = ledger[-1], [row for row in ledger if row["step"] > past.step]
    given_up = {index for row in later for index in row["failed_submissions"]}
    waiting: dict[int, list[TrajectoryReceipt]] = {}
    discards = []
    for trajectory in unconsumed:
        identifier, num_tokens = trajectory.trajectory_id, trajectory.num_tokens
        if trajectory.newest_version > head["step"]:
            discards.append(Discard(identifier, num_tokens, "beyond_head"))
        elif identifier in committed.other_verifier:
            discards.append(Discard(identifier, num_tokens, "other_verifier"))
        else:
            waiting.setdefault(submission_index_of(identifier), []).append(trajectory)
    closed = {*past.closed_submissions, *committed.submission_indices, *given_up}
    first_open = past.next_open_submission
    cursor = max(head["next_submission_index"], first_open, *(index + 1 for index in closed))
    total = {name: getattr(past, name) + sum(row[name] for row in later) for name in TOKEN_SUMS}
    num_committed = past.num_tokens + committed.num_tokens
    return InitialState(
        policy_version=head["step"],
        weights_hash=head["weights_hash"],
        next_submission_index=cursor,
        resubmit=tuple(i for i in range(first_open, cursor) if i not in closed),
        waiting=tuple(GroupReceipt(i, (), tuple(waiting[i])) for i in sorted(waiting)),
        discards=tuple(discards),
        watermark=watermark,
        accounting=TokenAccounting(
            committed=num_committed,
            trained=total["num_trained_tokens"],
            masked=total["num_masked_tokens"],
            discarded=total["num_discarded_tokens"],
            entries=StepEntries(num_committed - total["num_generated_tokens"]),
        ),
    )
