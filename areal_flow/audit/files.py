"""Reads the files of a run directory for an audit: what cannot be read comes as a finding.

Directories may vanish meanwhile, since a run that goes on prunes them: those are left out. Which
values are right is decided by the rules, not here.
"""

from __future__ import annotations

import filecmp
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
from safetensors import SafetensorError

from areal_flow.audit.findings import ADVICE, Finding
from areal_flow.errors import ArealFlowError, PromptError
from areal_flow.layout import RunLayout
from areal_flow.prompts.table import PromptTable
from areal_flow.recovery.checkpoints import RNG_STATE, checkpoint_path, read_checkpoint_state
from areal_flow.recovery.lease import newest_lease
from areal_flow.store.maintenance import unreferenced_files

_UNREADABLE = (OSError, ValueError, TypeError, KeyError, SafetensorError, pa.ArrowException)


def unreadable(path: Path, error: object, advice: str = ADVICE["file"]) -> Finding:
    """Return the finding of something that cannot be read."""
    cause = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
    return Finding("unreadable", path.name, "something readable", cause, advice)


def read_forks(layout: RunLayout) -> Iterator[dict[str, Any] | Finding]:
    """Yield the recorded forks: step, recorded hash, hashes of what was replayed."""
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
            replayed = {
                kind: str(fork["replayed"][kind]) for kind in ("weights_hash", "served_hash")
            }
            recorded = str(fork["recorded"]["weights_hash"])
            yield {"step": int(fork["step"]), "recorded_hash": recorded, **replayed}
        except _UNREADABLE as error:
            yield unreadable(layout.forks, f"line {number}: {error!r}")


def read_prompts(layout: RunLayout, *, seed: int) -> PromptTable | Finding:
    """Return the prompt table once all of it was found readable."""
    try:
        _validate_arrow(layout.train_prompts)
        return PromptTable(layout.train_prompts, seed=seed)
    except (OSError, ValueError, pa.ArrowException, PromptError) as error:
        return unreadable(layout.train_prompts, error)


def listed_checkpoints(layout: RunLayout) -> list[Path]:
    """Return the checkpoint directories that are there, complete or not, by step."""
    if not layout.checkpoints.is_dir():
        return []
    steps = sorted(int(path.name) for path in layout.checkpoints.iterdir() if path.name.isdigit())
    return [checkpoint_path(layout.checkpoints, step) for step in steps]


def listed_weights(layout: RunLayout) -> list[Path]:
    """Return the directories of published versions: those of the newest writer, which count."""
    lease = newest_lease(layout.writers)
    root = layout.weights_of(lease.writer_epoch if lease else 0)
    files = [file for name in ("model.safetensors", "hash") for file in root.glob(f"*/{name}")]
    return sorted({file.parent for file in files if file.parent.name.isdigit()})


def read_checkpoint(layout: RunLayout, path: Path) -> dict[str, Any] | Finding | None:
    """Return what a checkpoint says of itself and the hashes of its tensors; None if it is gone."""
    from areal_flow.models.hashing import hash_file

    def read() -> dict[str, Any]:
        return {
            "listed_step": int(path.name),
            **asdict(read_checkpoint_state(path)),
            "found_weights_hash": hash_file(path / "model.safetensors"),
            "found_optimizer_hash": hash_file(path / "optimizer.safetensors", without=(RNG_STATE,)),
            "other_files": ", ".join(_other_files(layout.model, path)),
        }

    where, expected = f"checkpoint {int(path.name)}", "a complete checkpoint"
    broken = Finding("checkpoint-unreadable", where, expected, "", ADVICE["checkpoint"])
    return _read_directory(path, read, broken)


def read_weights(layout: RunLayout, path: Path) -> dict[str, Any] | Finding | None:
    """Return a published version's hash file and the hash of its tensors; None if it is gone."""
    from areal_flow.models.hashing import hash_file

    def read() -> dict[str, Any]:
        return {
            "step": int(path.name),
            "recorded_hash": (path / "hash").read_text(),
            "tensors_hash": hash_file(path / "model.safetensors"),
        }

    where = path.relative_to(layout.root).as_posix()
    broken = Finding("weights-unreadable", where, "published weights", "", ADVICE["weights"])
    return _read_directory(path, read, broken)


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
            yield Finding(rule, where, "a finished directory", "a rest", ADVICE["harmless"], "note")
    for path in (layout.trajectories, layout.steps, layout.evaluations):
        yield from _orphan_fragments(path)


def _read_directory(
    path: Path, read: Callable[[], dict[str, Any]], broken: Finding
) -> dict[str, Any] | Finding | None:
    try:
        found = {"place": broken.where, **read()}
    except _UNREADABLE as error:
        cause = f"{type(error).__name__}: {error}"[:300]
        return broken._replace(found=cause) if path.exists() else None
    return found if path.exists() else None


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
        yield unreadable(path, error)._replace(severity="note", advice=ADVICE["harmless"])
        return
    if orphans:
        found = f"{len(orphans)} never committed, the first is {Path(orphans[0]).name}"
        where, expected = f"{path.name}/data", "files of committed fragments"
        yield Finding("orphan-fragments", where, expected, found, ADVICE["harmless"], "note")
