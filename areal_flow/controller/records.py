"""What a run is known by: the seeds of its members, and each step as its ledger row. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from areal_flow.controller.accounting import StepEntries
from areal_flow.controller.speed import reward_metrics, speed_metrics, update_metrics
from areal_flow.step_metrics import NOTHING_TRAINED
from areal_flow.types import PolicyHashes, StepRequest, StepResult, counter_seed


@dataclass(frozen=True, slots=True)
class Provenance:
    """What every row of one driver's life carries."""

    writer_epoch: int
    config_hash: str
    code_version: str
    verifier: str = ""
    """Names and hashes of the code that scores; empty where nothing is scored."""


def member_seed(run_seed: int, submission_index: int, member: int) -> int:
    """Return a 63-bit seed, the same on every retry, on any generator and after any restart."""
    return counter_seed(run_seed, submission_index, member)


def group_seeds(run_seed: int, submission_index: int, group_size: int) -> tuple[int, ...]:
    """Return the seeds of a group's members."""
    return tuple(member_seed(run_seed, submission_index, m) for m in range(group_size))


def batch_digest(policy_version: int, trajectory_ids: Sequence[str]) -> str:
    """Return the identity of a step's input: trajectories, their order, and the policy."""
    text = "\n".join([str(policy_version), *trajectory_ids])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def step_row(
    request: StepRequest,
    result: StepResult,
    *,
    entries: StepEntries,
    watermark: int,
    next_submission_index: int,
    num_waiting_tokens: int,
    provenance: Provenance,
    seconds_wait: float,
    seconds_step: float,
    num_generators: int,
) -> dict[str, Any]:
    """Return the ledger row of a computed step.

    Args:
        entries: what happened since the row before.
        watermark: rows of the trajectory log when the row is written.
        next_submission_index: the prompt cursor then.
        num_waiting_tokens: committed then, and neither trained nor discarded.
        num_generators: of the recipe.
    """
    metrics = asdict(result.metrics)
    row = {
        "step": request.step,
        "policy_version": request.policy_version,
        "trajectory_ids": list(request.trajectory_ids),
        "batch_digest": request.batch_digest,
        "parent_hash": request.parent_hash,
        "num_generated_tokens": entries.num_generated_tokens,
        "num_discarded_tokens": sum(d.num_tokens for d in entries.discards),
        "discarded": [
            {"trajectory_id": d.trajectory_id, "reason": d.reason} for d in entries.discards
        ],
        "failed_submissions": list(entries.failed_submissions),
        "num_failed_members": entries.num_member_errors,
        "seconds_generate": entries.seconds_generate,
        "trajectory_watermark": watermark,
        "next_submission_index": next_submission_index,
        "num_waiting_tokens": num_waiting_tokens,
        **asdict(provenance),
        **asdict(result.hashes),
        **metrics,
        "masked_fraction_by_tenth": list(metrics["masked_fraction_by_tenth"]),
        "numeric_environment": result.numeric_environment,
        "seconds_wait": seconds_wait,
        "seconds_step": seconds_step,
        "committed_at": datetime.now(UTC),
    }
    speed = {
        **speed_metrics(
            row, num_generators=num_generators, seconds_observed=entries.seconds_observed
        ),
        **update_metrics(entries.served),
        **reward_metrics(
            entries.reward_queue_s, num_scored=entries.num_scored, seconds_step=seconds_step
        ),
    }
    return {**row, "metrics": {**metrics["metrics"], **speed}}


def genesis_row(
    hashes: PolicyHashes, *, provenance: Provenance, numeric_environment: str
) -> dict[str, Any]:
    """Return row 0: the policy that the first step starts from."""
    request = StepRequest(
        step=0,
        parent_hash="",
        policy_version=0,
        trajectory_ids=(),
        batch_digest=batch_digest(0, ()),
        max_staleness=0,
    )
    return step_row(
        request,
        StepResult(0, hashes, NOTHING_TRAINED, numeric_environment),
        entries=StepEntries(),
        watermark=0,
        next_submission_index=0,
        num_waiting_tokens=0,
        provenance=provenance,
        seconds_wait=0.0,
        seconds_step=0.0,
        num_generators=0,
    )
