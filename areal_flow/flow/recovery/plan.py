"""Decides where a resumed run goes on, from what its two logs say. Pure.

Committed trajectories are trained, discarded or waiting; submissions are committed, given up or to
be submitted again under the same index, so with the same prompt, seeds and ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal_flow.core.types import Discard, GroupReceipt, TrajectoryReceipt, submission_index_of
from areal_flow.flow.flow_setup import InitialState
from areal_flow.log.ledger_row import CommittedGroups, StepEntries, TokenAccounting

PLAN_COLUMNS = [
    "weights_hash",
    "next_submission_index",
    "failed_submissions",
    "num_generated_tokens",
    "num_trained_tokens",
    "num_masked_tokens",
    "num_discarded_tokens",
]


def plan_initial_state(
    ledger: Sequence[Mapping[str, Any]],
    unconsumed: Sequence[TrajectoryReceipt],
    committed: CommittedGroups,
    watermark: int,
) -> InitialState:
    head = ledger[-1]
    given_up = {index for row in ledger for index in row["failed_submissions"]}
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
    indices = committed.submission_indices
    cursor = max([head["next_submission_index"], *(index + 1 for index in indices)])
    total = {name: sum(row[name] for row in ledger) for name in PLAN_COLUMNS if "tokens" in name}
    return InitialState(
        policy_version=head["step"],
        weights_hash=head["weights_hash"],
        next_submission_index=cursor,
        resubmit=tuple(i for i in range(cursor) if i not in indices and i not in given_up),
        waiting=tuple(GroupReceipt(i, (), tuple(waiting[i])) for i in sorted(waiting)),
        discards=tuple(discards),
        watermark=watermark,
        accounting=TokenAccounting(
            committed=committed.num_tokens,
            trained=total["num_trained_tokens"],
            masked=total["num_masked_tokens"],
            discarded=total["num_discarded_tokens"],
            entries=StepEntries(committed.num_tokens - total["num_generated_tokens"]),
        ),
    )
