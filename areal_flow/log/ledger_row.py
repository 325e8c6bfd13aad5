"""A step's row in the ledger: token accounting, seeds, digests and speed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from areal_flow.core.digests import sha256_hex
from areal_flow.core.types import (
    NOTHING_TRAINED,
    SPEED_AREA,
    Discard,
    EngineStats,
    GroupReceipt,
    PolicyHashes,
    ServedWeights,
    StepRequest,
    StepResult,
    counter_seed,
)

SYSTEM_AREA = "system/"
MEASURED_AREAS = SPEED_AREA, SYSTEM_AREA
"""The prefixes of metrics that a replay does not compare."""
OBSERVED = f"{SPEED_AREA}generators_observed_s"
REWARD_TASKS = f"{SYSTEM_AREA}reward_task_s"
"""How long reward workers have worked since the driver began, all of them together."""
SPEED_COLUMNS = (
    *("step_s", "generate_s", "read_s", "train_s", "stage_s"),
    *("num_generated_tokens", "num_trained_tokens"),
)
"""The columns that `speed_metrics` reads."""


@dataclass(slots=True)
class StepEntries:
    """What happened since the last ledger row."""

    num_generated_tokens: int = 0
    discards: list[Discard] = field(default_factory=list)
    failed_submissions: list[int] = field(default_factory=list)
    generate_s: float = 0.0
    observed_s: float = 0.0
    """The time of all generators over which `generate_s` was counted."""
    num_member_errors: int = 0
    num_scored: int = 0
    reward_queue_s: list[float] = field(default_factory=list)
    """How long each written group waited to be scored."""
    served: list[ServedWeights] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CommittedGroups:
    """What the trajectory log has beyond the settled past when a run is resumed."""

    submission_indices: Set[int] = frozenset()
    num_tokens: int = 0
    other_verifier: Set[str] = frozenset()
    """Ids of waiting trajectories that another verifier scored than the run's present one."""


@dataclass(slots=True)
class TokenAccounting:
    """Totals of the run so far, and the entries of the next ledger row.

    Every completion token is counted once: committed = trained + masked + discarded + waiting.
    """

    committed: int = 0
    trained: int = 0
    masked: int = 0
    discarded: int = 0
    in_step: int = 0
    entries: StepEntries = field(default_factory=StepEntries)
    engine_totals: dict[str, EngineStats] = field(default_factory=dict)
    """The latest report of each engine, by incarnation."""

    def commit(self, num_tokens: int) -> None:
        self.committed += num_tokens
        self.entries.num_generated_tokens += num_tokens

    def commit_group(self, receipt: GroupReceipt) -> None:
        self.commit(sum(t.num_tokens for t in receipt.trajectories))
        entries = self.entries
        entries.num_member_errors += len(receipt.member_errors)
        entries.num_scored += sum(t.reward is not None for t in receipt.trajectories)
        entries.reward_queue_s.append(receipt.reward_queue_s)
        self._count_engine_time(receipt.engine_stats)

    def _count_engine_time(self, stats: EngineStats) -> None:
        last = self.engine_totals.get(stats.incarnation, EngineStats())
        if (stats.elapsed_s, stats.busy_s) > (last.elapsed_s, last.busy_s):
            self.entries.generate_s += stats.busy_s - last.busy_s
            self.entries.observed_s += stats.elapsed_s - last.elapsed_s
            self.engine_totals[stats.incarnation] = stats

    def discard(self, discards: list[Discard]) -> None:
        self.discarded += sum(d.num_tokens for d in discards)
        self.entries.discards += discards

    def begin_step(self, num_tokens: int) -> None:
        self.in_step = num_tokens

    def end_step(self, *, num_trained: int, num_masked: int) -> None:
        self.in_step = 0
        self.trained += num_trained
        self.masked += num_masked

    def close_entries(self) -> StepEntries:
        """Return the entries for a ledger row and start new ones."""
        closed, self.entries = self.entries, StepEntries()
        return closed

    def imbalance(self, *, num_waiting: int) -> int:
        """Return committed minus everything accounted for; anything but 0 is a bug."""
        consumed = self.trained + self.masked + self.discarded + self.in_step
        return self.committed - consumed - num_waiting


@dataclass(frozen=True, slots=True)
class Provenance:
    """Columns that are the same in all rows of one driver's life."""

    writer_epoch: int
    config_hash: str
    code_version: str
    verifier: str = ""
    """Names and hashes of the code that scores; empty where nothing is scored."""


def member_seed(run_seed: int, submission_index: int, member: int) -> int:
    """Return a 63-bit seed, the same on every retry, on any generator and after any restart."""
    return counter_seed(run_seed, submission_index, member)


def group_seeds(run_seed: int, submission_index: int, group_size: int) -> tuple[int, ...]:
    return tuple(member_seed(run_seed, submission_index, m) for m in range(group_size))


def batch_digest(policy_version: int, trajectory_ids: Sequence[str]) -> str:
    """Return the identity of a step's input: trajectories, their order, and the policy."""
    text = "\n".join([str(policy_version), *trajectory_ids])
    return sha256_hex(text, 32)


def step_row(
    request: StepRequest,
    result: StepResult,
    *,
    entries: StepEntries,
    watermark: int,
    next_submission_index: int,
    num_waiting_tokens: int,
    provenance: Provenance,
    wait_s: float,
    step_s: float,
    num_generators: int,
    usage: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the ledger row of a computed step; `entries` happened since the row before."""
    metrics = asdict(result.metrics)
    row = {
        "step": request.step,
        "policy_version": request.policy_version,
        "trajectory_ids": list(request.trajectory_ids),
        "batch_digest": request.batch_digest,
        "parent_hash": result.parent_hash,
        "num_generated_tokens": entries.num_generated_tokens,
        "num_discarded_tokens": sum(d.num_tokens for d in entries.discards),
        "discarded": [
            {"trajectory_id": d.trajectory_id, "reason": d.reason} for d in entries.discards
        ],
        "failed_submissions": list(entries.failed_submissions),
        "num_failed_members": entries.num_member_errors,
        "generate_s": entries.generate_s,
        "trajectory_watermark": watermark,
        "next_submission_index": next_submission_index,
        "num_waiting_tokens": num_waiting_tokens,
        **asdict(provenance),
        **asdict(result.hashes),
        **metrics,
        **{name: list(values) for name, values in metrics.items() if isinstance(values, tuple)},
        "numeric_environment": result.numeric_environment,
        "wait_s": wait_s,
        "step_s": step_s,
        "committed_at": datetime.now(UTC),
    }
    speed = _speed_of_step(row, entries, num_generators=num_generators)
    return {**row, "metrics": {**metrics["metrics"], **speed, **(usage or {})}}


def _speed_of_step(
    row: Mapping[str, Any], entries: StepEntries, *, num_generators: int
) -> dict[str, float]:
    seconds, queue_s = row["step_s"], entries.reward_queue_s
    observed_s = entries.observed_s
    return {
        **speed_metrics(row, num_generators=num_generators, observed_s=observed_s),
        **update_metrics(entries.served),
        **reward_metrics(queue_s, num_scored=entries.num_scored, step_s=seconds),
    }


def genesis_row(
    hashes: PolicyHashes, *, provenance: Provenance, numeric_environment: str
) -> dict[str, Any]:
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
        StepResult(0, hashes, NOTHING_TRAINED, numeric_environment, parent_hash=""),
        entries=StepEntries(),
        watermark=0,
        next_submission_index=0,
        num_waiting_tokens=0,
        provenance=provenance,
        wait_s=0.0,
        step_s=0.0,
        num_generators=0,
    )


def speed_metrics(
    totals: Mapping[str, float], *, num_generators: int, observed_s: float = 0.0
) -> dict[str, float]:
    """Return the metrics of steps by name; none of steps that took no time.

    Args:
        totals: `SPEED_COLUMNS` of a ledger row, or the sums of several.
        num_generators: of the recipe.
        observed_s: the time of all generators over which `generate_s` was counted. It
            differs from that of the steps, since a generator reports with each group. 0: unknown.
    """
    seconds = totals["step_s"]
    if not seconds:
        return {}
    generators = observed_s or num_generators * seconds
    training = sum(totals[f"{part}_s"] for part in ("read", "train", "stage"))
    return {
        f"{SPEED_AREA}generated_tokens_per_s": totals["num_generated_tokens"] / seconds,
        f"{SPEED_AREA}trained_tokens_per_s": totals["num_trained_tokens"] / seconds,
        f"{SPEED_AREA}generators_busy_fraction": totals["generate_s"] / generators,
        f"{SPEED_AREA}trainer_busy_fraction": training / seconds,
        **({OBSERVED: observed_s} if observed_s else {}),
    }


def update_metrics(served: Sequence[ServedWeights]) -> dict[str, float]:
    """Return how many generators loaded new weights, and how long reading and switching took."""
    if not served:
        return {}
    metrics: dict[str, float] = {f"{SPEED_AREA}weights_num_served": len(served)}
    for name in ("transfer_s", "stall_s"):
        seconds = [getattr(update, name) for update in served]
        metrics[f"{SPEED_AREA}weights_{name}_mean"] = sum(seconds) / len(seconds)
        metrics[f"{SPEED_AREA}weights_{name}_max"] = max(seconds)
    return metrics


def reward_metrics(queue_s: Sequence[float], *, num_scored: int, step_s: float) -> dict[str, float]:
    """Return how many completions were scored a second, and how long groups waited for it.

    Args:
        queue_s: of each group that was scored since the row before.
        num_scored: completions that got a reward since then.
        step_s: the time since then.
    """
    if not queue_s or not step_s:
        return {}
    return {
        f"{SPEED_AREA}rewards_per_s": num_scored / step_s,
        f"{SPEED_AREA}reward_queue_s_mean": sum(queue_s) / len(queue_s),
        f"{SPEED_AREA}reward_queue_s_max": max(queue_s),
    }
