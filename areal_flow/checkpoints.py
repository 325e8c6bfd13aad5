"""Which checkpoints a run has. Names and descriptions only: tensors are the trainer's.

A directory named by its step is complete; one that is being written has another name.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """What a checkpoint knows beside its tensors."""

    step: int
    weights_hash: str
    optimizer_hash: str
    next_submission_index: int
    config_hash: str


def checkpoint_path(root: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies."""
    return root / f"{step:08d}"


def list_checkpoints(root: Path) -> list[int]:
    """Return the steps that have a complete checkpoint, ascending."""
    if not root.is_dir():
        return []
    return sorted(
        int(entry.name)
        for entry in root.iterdir()
        if entry.name.isdigit() and (entry / "state.json").is_file()
    )


def read_checkpoint_state(path: Path) -> CheckpointState:
    """Read a checkpoint's description."""
    return CheckpointState(**json.loads((path / "state.json").read_text()))


def checkpoint_hashes(root: Path) -> dict[int, str]:
    """Return the weights hash of every complete checkpoint by its step, ascending."""
    return {
        step: read_checkpoint_state(checkpoint_path(root, step)).weights_hash
        for step in list_checkpoints(root)
    }


def prune_checkpoints(root: Path, *, keep: int) -> list[Path]:
    """Remove all but step 0 and the newest `keep`; return what was removed.

    Each is renamed first: one that is half removed must not look complete.
    """
    pruned = [checkpoint_path(root, step) for step in list_checkpoints(root)[1:-keep]]
    for path in pruned:
        path.rename(path.with_name(f".pruned-{path.name}"))
    for rest in root.glob(".pruned-*"):
        shutil.rmtree(rest, ignore_errors=True)
    return pruned
