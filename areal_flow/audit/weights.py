"""Rules of checkpoints and published weights: files, their descriptions and the ledger agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from areal_flow.audit.findings import Finding
from areal_flow.audit.ledger import Row, replayed
from areal_flow.recovery.checkpoints import CheckpointState

REMOVE_CHECKPOINT = "remove it: --resume goes on from an older one"
REMOVE_WEIGHTS = "remove it: --resume publishes the newest version again"


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint as it lies there: what it says of itself, and its tensors' hashes."""

    step: int
    state: CheckpointState
    weights_hash: str
    optimizer_hash: str
    other_files: tuple[str, ...] = ()
    """Files of the run's model directory that are not the same here."""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """A published version as it lies there: the hash beside the tensors, and theirs."""

    where: str
    version: int
    recorded_hash: str
    tensors_hash: str


def check_checkpoint(checkpoint: StoredCheckpoint, rows: Mapping[int, Row]) -> Iterator[Finding]:
    """Yield what is wrong with one checkpoint; `rows` by step."""
    state, where = checkpoint.state, f"checkpoint {checkpoint.step}"
    if state.step != checkpoint.step:
        expected, found = f"step {checkpoint.step} in state.json", str(state.step)
        yield Finding("checkpoint-step", where, expected, found, REMOVE_CHECKPOINT)
    for rule, said, found in (
        ("checkpoint-weights", state.weights_hash, checkpoint.weights_hash),
        ("checkpoint-optimizer", state.optimizer_hash, checkpoint.optimizer_hash),
    ):
        if said != found:
            yield Finding(rule, where, f"{said}, by state.json", found, REMOVE_CHECKPOINT)
    for name in checkpoint.other_files:
        expected, found = f"the {name} of the run's model directory", "another"
        yield Finding("checkpoint-model", where, expected, found, REMOVE_CHECKPOINT)
    row = rows.get(checkpoint.step)
    if row is not None:
        yield from _check_against_row(where, state, row)


def check_steps(
    checkpoints: Sequence[int], versions: Sequence[int], rows: Sequence[Row]
) -> Iterator[Finding]:
    """Yield checkpoints and published versions that the ledger does not know, by their steps.

    The first checkpoint must be there as soon as a step was trained on it.
    """
    head = max((row["step"] for row in rows), default=-1)
    for rule, kind, steps, advice in (
        ("checkpoint-beyond-ledger", "checkpoint", checkpoints, REMOVE_CHECKPOINT),
        ("weights-beyond-ledger", "weights", versions, REMOVE_WEIGHTS),
    ):
        for step in steps:
            if step > head:
                expected, found = f"a step of the ledger, 0 to {head}", "a later one"
                yield Finding(rule, f"{kind} {step}", expected, found, advice)
    if head > 0 and 0 not in checkpoints:
        expected, advice = "the policy before training", "restore it from a copy"
        yield Finding("checkpoint-missing", "checkpoint 0", expected, "none", advice)


def check_weights(
    weights: StoredWeights, rows: Mapping[int, Row], forks: Sequence[Row]
) -> Iterator[Finding]:
    """Yield what is wrong with one published version; `rows` by step."""
    where, recorded = weights.where, weights.recorded_hash
    if weights.tensors_hash != recorded:
        expected = f"{recorded}, by its hash file"
        yield Finding("weights-hash", where, expected, weights.tensors_hash, REMOVE_WEIGHTS)
    row = rows.get(weights.version)
    if row is None:
        return
    if recorded not in {row["served_hash"], *replayed(forks, weights.version, "served_hash")}:
        expected = f"{row['served_hash']}, by the ledger"
        yield Finding("weights-ledger", where, expected, recorded, REMOVE_WEIGHTS)


def _check_against_row(where: str, state: CheckpointState, row: Row) -> Iterator[Finding]:
    for name in ("weights_hash", "next_submission_index", "config_hash"):
        said = getattr(state, name)
        if said != row[name]:
            expected = f"{name} {row[name]}, by the ledger"
            yield Finding("checkpoint-ledger", where, expected, str(said), REMOVE_CHECKPOINT)
