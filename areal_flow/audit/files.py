"""A run directory in, plain values for the audit out; what cannot be read comes as a finding.

Directories may vanish meanwhile, since a run that goes on prunes them: those are left out.
"""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from safetensors import SafetensorError

from areal_flow.audit.findings import Finding
from areal_flow.audit.weights import (
    REMOVE_CHECKPOINT,
    REMOVE_WEIGHTS,
    StoredCheckpoint,
    StoredWeights,
)
from areal_flow.errors import ArealFlowError, PromptError
from areal_flow.layout import RunLayout
from areal_flow.prompts.table import PromptTable
from areal_flow.recovery.checkpoints import RNG_STATE, checkpoint_path, read_checkpoint_state
from areal_flow.recovery.lease import newest_lease
from areal_flow.store.maintenance import unreferenced_files

RESTORE = "restore it from a copy"
HARMLESS = "nothing: nobody reads it"


def unreadable(path: Path, error: object, advice: str = RESTORE) -> Finding:
    """Return the finding of something that cannot be read."""
    cause = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
    return Finding("unreadable", path.name, "something readable", cause, advice)


def read_forks(layout: RunLayout) -> Iterator[dict[str, Any] | Finding]:
    """Yield the recorded forks."""
    if not layout.forks.exists():
        return
    try:
        lines = layout.forks.read_text().splitlines()
    except (OSError, ValueError) as error:
        yield unreadable(layout.forks, error)
        return
    for number, line in enumerate(lines, 1):
        try:
            fork = json.loads(line)
            step, recorded, now = fork["step"], fork["recorded"], fork["replayed"]
            hashes = {kind: str(now[kind]) for kind in ("weights_hash", "served_hash")}
            yield {
                "step": step,
                "recorded": {"weights_hash": recorded["weights_hash"]},
                "replayed": hashes,
            }
        except (ValueError, KeyError, TypeError) as error:
            yield unreadable(layout.forks, f"line {number}: {error!r}")


def read_prompts(layout: RunLayout, *, seed: int) -> PromptTable | Finding:
    """Return the prompt table once all of it was found readable."""
    try:
        _validate_arrow(layout.train_prompts)
        return PromptTable(layout.train_prompts, seed=seed)
    except (OSError, ValueError, pa.ArrowException, PromptError) as error:
        return unreadable(layout.train_prompts, error)


def listed_checkpoints(layout: RunLayout) -> list[int]:
    """Return the steps whose checkpoint directory is there, complete or not, ascending."""
    if not layout.checkpoints.is_dir():
        return []
    return sorted(int(entry.name) for entry in layout.checkpoints.iterdir() if entry.name.isdigit())


def read_checkpoint(layout: RunLayout, step: int) -> StoredCheckpoint | Finding | None:
    """Return a checkpoint with the hashes of its tensors; None if it is gone."""
    from areal_flow.models.hashing import hash_file

    path = checkpoint_path(layout.checkpoints, step)
    try:
        state = read_checkpoint_state(path)
        weights_hash = hash_file(path / "model.safetensors")
        optimizer_hash = hash_file(path / "optimizer.safetensors", without=(RNG_STATE,))
        others = _other_files(layout.model, path)
        found = StoredCheckpoint(step, state, weights_hash, optimizer_hash, others)
        return found if path.exists() else None
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        if not path.exists():
            return None
        where, expected = f"checkpoint {step}", "a complete checkpoint"
        cause = f"{type(error).__name__}: {error}"[:300]
        return Finding("checkpoint-unreadable", where, expected, cause, REMOVE_CHECKPOINT)


def listed_weights(layout: RunLayout) -> list[Path]:
    """Return the directories of published versions: those of the newest writer, which count."""
    claim = newest_lease(layout.writers)
    root = layout.weights_of(claim.writer_epoch if claim else 0)
    files = [file for name in ("model.safetensors", "hash") for file in root.glob(f"*/{name}")]
    return sorted({file.parent for file in files if file.parent.name.isdigit()})


def read_weights(layout: RunLayout, path: Path) -> StoredWeights | Finding | None:
    """Return a published version with the hash of its tensors; None if it is gone."""
    from areal_flow.models.hashing import hash_file

    where = path.relative_to(layout.root).as_posix()
    try:
        recorded = (path / "hash").read_text()
        found = hash_file(path / "model.safetensors")
        return StoredWeights(where, int(path.name), recorded, found)
    except (OSError, ValueError, SafetensorError) as error:
        if not path.exists():
            return None
        cause = f"{type(error).__name__}: {error}"[:300]
        return Finding("weights-unreadable", where, "published weights", cause, REMOVE_WEIGHTS)


def not_prepared(layout: RunLayout) -> bool:
    """Return whether a run is being prepared, or died of it: the ledger is what it makes last."""
    return not (layout.steps.exists() or layout.checkpoints.exists() or layout.weights.exists())


def broken_descriptions(layout: RunLayout) -> Iterator[Finding]:
    """Yield what the next start needs beside the log and cannot read."""
    for path in (
        layout.state,
        layout.model / "config.json",
        layout.model / "tokenizer.json",
    ):
        try:
            if not isinstance(json.loads(path.read_text()), dict):
                yield unreadable(path, "not a JSON object")
        except (OSError, ValueError) as error:
            yield unreadable(path, error)
    try:
        _validate_arrow(layout.held_out_prompts)
    except (OSError, ValueError, pa.ArrowException) as error:
        yield unreadable(layout.held_out_prompts, error)


def leftovers(layout: RunLayout) -> Iterator[Finding]:
    """Yield notes on what a crash, or a run that goes on, has written but not finished."""
    for rule, root, pattern in (
        ("staged-weights", layout.weights, ".staged-*"),
        ("partial-checkpoint", layout.checkpoints, ".partial-*"),
        ("pruned-checkpoint", layout.checkpoints, ".pruned-*"),
    ):
        for path in sorted(root.rglob(pattern)):
            where = path.relative_to(layout.root).as_posix()
            yield Finding(rule, where, "a finished directory", "a rest", HARMLESS, "note")
    for path in (layout.trajectories, layout.steps, layout.evaluations):
        yield from _orphan_fragments(path)


def _validate_arrow(path: Path) -> None:
    with pa.memory_map(str(path)) as file:
        pa.ipc.open_file(file).read_all().validate(full=True)


def _other_files(model: Path, checkpoint: Path) -> tuple[str, ...]:
    names = [file.name for file in model.iterdir()]
    _, different, unreadable = filecmp.cmpfiles(model, checkpoint, names, shallow=False)
    return (*different, *unreadable)


def _orphan_fragments(path: Path) -> Iterator[Finding]:
    if not path.is_dir():
        return
    try:
        orphans = unreferenced_files(path)
    except ArealFlowError as error:
        yield unreadable(path, error)._replace(severity="note", advice=HARMLESS)
        return
    if orphans:
        found = f"{len(orphans)} never committed, the first is {Path(orphans[0]).name}"
        where, expected = f"{path.name}/data", "files of committed fragments"
        yield Finding("orphan-fragments", where, expected, found, HARMLESS, "note")
