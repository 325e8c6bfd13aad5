"""The way back to a recorded step: load a checkpoint, then train the ledger's later rows again.

A resumed run restores its trainer ranks this way, and a replay its rank in this process. Each step
is returned beside its record; the caller decides about one that differs.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from math import isclose
from typing import Any, Protocol

from areal_flow.config import Recipe
from areal_flow.core.errors import RunError, TrainerLost, TrainingError
from areal_flow.core.layout import RunLayout
from areal_flow.core.types import ENGINE_GAP, PolicyHashes, StepMetrics, StepRequest, StepResult
from areal_flow.log.ledger import LedgerReader
from areal_flow.log.ledger_row import MEASURED_AREAS
from areal_flow.policy.checkpoints import (
    checkpoint_hashes,
    checkpoint_path,
    forked_policies,
    move_damaged_checkpoint,
    record_fork,
)
from areal_flow.policy.weights.channel import WeightsWriter

COMPARED_METRICS = ("loss", "grad_norm", "num_trained_tokens", "num_masked_tokens")
"""Compared besides everything in the `metrics` map that is not a speed."""

SHARED = {"backend", "context_ranks", "shard_ranks"}
"""Keys of a numeric environment that differ where ranks share the policy or its sequences."""

TOLERANCE = {"float32": 1e-4, "tf32": 1e-2, "bfloat16": 5e-2}
"""Relative tolerance, by dtype, for numbers of a step from equal weights where sums have another
order: on ranks that share the policy or sequences, or on a GPU. The absolute tolerance is a
hundredth of it."""

logger = logging.getLogger(__name__)


class RestorableTrainer(Protocol):
    """All trainer ranks, in other processes or in this one."""

    async def restore(self, checkpoint: int) -> PolicyHashes:
        """Load the checkpoint of a step.

        Raises:
            TrainerLost: a rank died meanwhile.
            TrainingError: the checkpoint cannot be read.
        """

    async def step(self, request: StepRequest) -> StepResult:
        """Compute one step."""


@dataclass(frozen=True, slots=True)
class ComparedStep:
    """One step, recorded and replayed. After a fork it started from other weights."""

    recorded: StepResult
    replayed: StepResult
    after_fork: bool = False

    @property
    def step(self) -> int:
        return self.recorded.step

    @property
    def differences(self) -> dict[str, tuple[Any, Any]]:
        """Return recorded and replayed values by name, of the metrics that were recorded."""
        recorded, replayed = compared_values(self.recorded), compared_values(self.replayed)
        return _differences(recorded, {name: replayed.get(name) for name in recorded})

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def forked(self) -> bool:
        return self.recorded.hashes != self.replayed.hashes

    @property
    def refused(self) -> bool:
        """Return whether a step differs in an environment that repeats its bits.

        Where ranks share the policy or sequences, a difference within the tolerance is allowed.
        """
        is_comparable = self.environment_differences.keys() <= SHARED and self.repeats_bits
        return is_comparable and not self.within_tolerance and not self.after_fork

    @property
    def repeats_bits(self) -> bool:
        """Return whether sums have a fixed order: on a CPU, or with deterministic kernels."""
        environment = json.loads(self.replayed.numeric_environment)
        return bool(environment["device"] == "cpu" or environment.get("kernels") == "deterministic")

    @property
    def tolerance(self) -> float:
        if self.repeats_bits and not self.environment_differences.keys() & SHARED:
            return 0.0
        return TOLERANCE[json.loads(self.recorded.numeric_environment)["dtype"]]

    @property
    def within_tolerance(self) -> bool:
        tolerance = self.tolerance
        if not tolerance:
            return self.equal
        hashes = asdict(self.recorded.hashes)
        return all(
            recorded is not None
            and replayed is not None
            and isclose(recorded, replayed, rel_tol=tolerance, abs_tol=tolerance / 100)
            for name, (recorded, replayed) in self.differences.items()
            if name not in hashes and not name.startswith(ENGINE_GAP)  # it is rounding itself
        )

    @property
    def environment_differences(self) -> dict[str, tuple[Any, Any]]:
        return _differences(
            json.loads(self.recorded.numeric_environment),
            json.loads(self.replayed.numeric_environment),
        )


def compared_values(result: StepResult) -> dict[str, Any]:
    metrics = {name: getattr(result.metrics, name) for name in COMPARED_METRICS}
    values = result.metrics.metrics.items()
    computed = {name: value for name, value in values if not name.startswith(MEASURED_AREAS)}
    return {**metrics, **computed, **asdict(result.hashes)}


def _differences(
    recorded: Mapping[str, Any], replayed: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    return {
        name: (recorded.get(name), replayed.get(name))
        for name in {**recorded, **replayed}
        if recorded.get(name) != replayed.get(name)
    }


def result_from_row(row: Mapping[str, Any]) -> StepResult:
    metrics = {field.name: row[field.name] for field in fields(StepMetrics)}
    metrics |= {name: tuple(v) for name, v in metrics.items() if isinstance(v, list)}
    hashes = PolicyHashes(row["weights_hash"], row["served_hash"])
    environment, parent_hash = row["numeric_environment"], row["parent_hash"]
    return StepResult(row["step"], hashes, StepMetrics(**metrics), environment, parent_hash)


@dataclass
class LedgerReplay:
    trainer: RestorableTrainer
    rows: Sequence[Mapping[str, Any]]
    """The ledger from the checkpoint's own row on."""
    hashes: PolicyHashes
    """Of the policy that the trainer has now."""
    max_staleness: int
    """Of the run, in versions."""
    forked: bool = False
    step: int = field(init=False)

    def __post_init__(self) -> None:
        self.checkpoint: int = self.rows[0]["step"]
        self.step = self.checkpoint

    @property
    def next_request(self) -> StepRequest:
        row = self.rows[self.step + 1 - self.checkpoint]
        return StepRequest(
            step=row["step"],
            parent_hash=self.hashes.weights_hash,
            policy_version=row["policy_version"],
            trajectory_ids=tuple(row["trajectory_ids"]),
            batch_digest=row["batch_digest"],
            max_staleness=self.max_staleness,
        )

    async def advance(self) -> ComparedStep:
        row = self.rows[self.step + 1 - self.checkpoint]
        after_fork = self.forked or self.hashes.weights_hash != row["parent_hash"]
        replayed = await self.trainer.step(self.next_request)
        compared = ComparedStep(result_from_row(row), replayed, after_fork=after_fork)
        self.step, self.hashes = replayed.step, replayed.hashes
        self.forked = self.forked or compared.forked
        return compared


async def restore_newest(
    trainer: RestorableTrainer,
    ledger: LedgerReader,
    checkpoints: Mapping[int, str],
    *,
    forks: Mapping[int, Sequence[PolicyHashes]],
    at_most: int,
    max_staleness: int,
    on_damaged: Callable[[int, TrainingError], None],
) -> LedgerReplay | None:
    """Restore the newest readable checkpoint of the ledger's weights, or of a recorded fork's.

    Returns:
        The replay from there, or None if there is no such checkpoint.
    """
    for checkpoint, weights_hash in sorted(checkpoints.items(), reverse=True):
        if checkpoint > min(at_most, ledger.head):
            continue
        recorded = PolicyHashes(**ledger.row(checkpoint, ["weights_hash", "served_hash"]))
        candidates = [recorded, *forks.get(checkpoint, ())]
        expected = [each for each in candidates if each.weights_hash == weights_hash]
        if not expected:
            continue
        try:
            restored = await trainer.restore(checkpoint)
        except TrainerLost:
            raise
        except TrainingError as error:
            on_damaged(checkpoint, error)
            continue
        if restored in expected:
            return LedgerReplay(trainer, ledger.rows(since=checkpoint), restored, max_staleness)
        logger.warning(
            "checkpoint %d was restored to %s, expected %s", checkpoint, restored, expected
        )
    return None


async def restore_policy(
    trainer: RestorableTrainer,
    layout: RunLayout,
    recipe: Recipe,
    ledger: LedgerReader,
    channel: WeightsWriter,
    *,
    on_replayed: Callable[[int, int], None],
) -> tuple[PolicyHashes, int]:
    """Restore the ledger's head; return the policy and how many steps were replayed."""
    replay = await restore_newest(
        trainer,
        ledger,
        checkpoint_hashes(layout.checkpoints),
        forks=forked_policies(layout.forks),
        at_most=ledger.head,
        max_staleness=recipe.controller.max_staleness,
        on_damaged=lambda step, e: move_damaged_checkpoint(
            checkpoint_path(layout.checkpoints, step), e
        ),
    )
    if replay is None:
        raise RunError(
            f"{layout.name} has no complete checkpoint that its ledger knows: it stopped before "
            "training began. Remove it and start again"
        )
    num_steps = ledger.head - replay.checkpoint
    while replay.step < ledger.head:
        note_fork(layout, await replay.advance())
        on_replayed(replay.step - replay.checkpoint, num_steps)
    await asyncio.to_thread(channel.publish, ledger.head)
    return replay.hashes, num_steps


def note_fork(layout: RunLayout, compared: ComparedStep) -> None:
    """Record a replayed step whose policy differs from the ledger's, or refuse it.

    In the same numeric environment of a CPU hashes must be equal. Elsewhere the run goes on
    from the fork, which is appended to forks.jsonl.
    """
    if not compared.forked:
        return
    fork = {
        "step": compared.step,
        "recorded": asdict(compared.recorded.hashes),
        "replayed": asdict(compared.replayed.hashes),
        "recorded_on": json.loads(compared.recorded.numeric_environment),
        "replayed_on": json.loads(compared.replayed.numeric_environment),
        "at": datetime.now(UTC).isoformat(),
    }
    message = "step {step} replayed to {replayed}, the ledger has {recorded}".format(**fork)
    if compared.refused:
        raise TrainingError(f"{message}, in the same numeric environment")
    where = "recorded on {recorded_on}, replayed on {replayed_on}".format(**fork)
    logger.warning("fork: %s; %s", message, where)
    record_fork(layout.forks, fork)
