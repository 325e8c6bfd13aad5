"""Decides where a resumed run goes on, from what its two logs say. Pure.

Committed trajectories are trained, discarded or waiting; submissions are committed, given up or to
be submitted again under the same index, so with the same prompt, seeds and ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from areal_flow.controller.accounting import StepEntries, TokenAccounting
from areal_flow.controller.flow_setup import InitialState
from areal_flow.types import (
    Discard,
    GroupReceipt,
    LogHead,
    StepRequest,
    TrajectoryReceipt,
    submission_index_of,
)

PLAN_COLUMNS = [
    "weights_hash",
    "next_submission_index",
    "failed_submissions",
    "num_generated_tokens",
    "num_trained_tokens",
    "num_masked_tokens",
    "num_discarded_tokens",
]


@dataclass(frozen=True, slots=True)
class CommittedGroups:
    """What the trajectory log holds in all."""

    submission_indices: Set[int] = frozenset()
    num_tokens: int = 0


def choose_checkpoint(
    checkpoints: Mapping[int, str], ledger: Sequence[Mapping[str, Any]]
) -> int | None:
    """Return the newest checkpointed step whose weights hash is that of its ledger row.

    Args:
        checkpoints: weights hash by step.
        ledger: rows by step, from 0.
    """
    usable = [
        step
        for step, weights_hash in checkpoints.items()
        if step < len(ledger) and ledger[step]["weights_hash"] == weights_hash
    ]
    return max(usable, default=None)


def request_from_row(
    row: Mapping[str, Any], *, parent_hash: str, max_staleness: int
) -> StepRequest:
    """Return the request that a ledger row answered: replaying it makes the same policy.

    Args:
        parent_hash: of the weights to replay on: the row's own, unless an earlier step forked.
    """
    return StepRequest(
        step=row["step"],
        parent_hash=parent_hash,
        policy_version=row["policy_version"],
        trajectory_ids=tuple(row["trajectory_ids"]),
        batch_digest=row["batch_digest"],
        max_staleness=max_staleness,
    )


def plan_initial_state(
    ledger: Sequence[Mapping[str, Any]],
    unconsumed: Sequence[TrajectoryReceipt],
    committed: CommittedGroups,
    log_head: LogHead,
) -> InitialState:
    """Return where the flow goes on.

    Args:
        ledger: `PLAN_COLUMNS` of every row, by step.
        unconsumed: committed trajectories that no row trained or discarded.
        committed: what the log holds in all.
        log_head: how far the trajectory log is.
    """
    head = ledger[-1]
    given_up = {index for row in ledger for index in row["failed_submissions"]}
    waiting: dict[int, list[TrajectoryReceipt]] = {}
    discards: list[Discard] = []
    for trajectory in unconsumed:
        if trajectory.newest_version > head["step"]:
            lost = Discard(trajectory.trajectory_id, trajectory.num_tokens, "beyond_head")
            discards.append(lost)
        else:
            index = submission_index_of(trajectory.trajectory_id)
            waiting.setdefault(index, []).append(trajectory)
    indices = committed.submission_indices
    cursor = max([head["next_submission_index"], *(index + 1 for index in indices)])
    return InitialState(
        policy_version=head["step"],
        weights_hash=head["weights_hash"],
        next_submission_index=cursor,
        resubmit=tuple(i for i in range(cursor) if i not in indices and i not in given_up),
        waiting=tuple(GroupReceipt(i, (), tuple(waiting[i])) for i in sorted(waiting)),
        discards=tuple(discards),
        log_head=log_head,
        accounting=_accounting(ledger, committed),
    )


def _accounting(ledger: Sequence[Mapping[str, Any]], committed: CommittedGroups) -> TokenAccounting:
    in_ledger = sum(row["num_generated_tokens"] for row in ledger)
    return TokenAccounting(
        committed=committed.num_tokens,
        trained=sum(row["num_trained_tokens"] for row in ledger),
        masked=sum(row["num_masked_tokens"] for row in ledger),
        discarded=sum(row["num_discarded_tokens"] for row in ledger),
        entries=StepEntries(num_generated_tokens=committed.num_tokens - in_ledger),
    )
