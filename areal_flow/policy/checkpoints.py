"""Lists, describes and prunes a run's checkpoints: complete directories, named by their steps."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_flow.core.types import PolicyHashes

RNG_STATE = "torch_rng_state"
"""Name of the tensor with torch's random state in optimizer.safetensors."""

MODEL_FILE = "model.safetensors"
ADAPTER_FILE = "adapter.safetensors"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointState:
    step: int
    weights_hash: str
    next_submission_index: int
    config_hash: str
    optimizer_hash: str = ""
    """Hash of the optimizer's tensors, computed when they are written."""


def checkpoint_path(root: Path, step: int) -> Path:
    return root / f"{step:08d}"


def list_checkpoints(root: Path) -> list[int]:
    if not root.is_dir():
        return []
    return sorted(
        int(entry.name)
        for entry in root.iterdir()
        if entry.name.isdigit() and (entry / "state.json").is_file()
    )


def weight_files(path: Path) -> list[Path]:
    """Return the files of a checkpoint's weights; an adapter's base is in checkpoint 0."""
    if not (path / ADAPTER_FILE).is_file():
        return [path / MODEL_FILE]
    base = path if (path / MODEL_FILE).is_file() else checkpoint_path(path.parent, 0)
    return [base / MODEL_FILE, path / ADAPTER_FILE]


def read_checkpoint_state(path: Path) -> CheckpointState:
    return CheckpointState(**json.loads((path / "state.json").read_text()))


def set_aside(path: Path) -> Path:
    target = path.with_name(f".damaged-{path.name}")
    shutil.rmtree(target, ignore_errors=True)
    return path.rename(target)


def move_damaged_checkpoint(path: Path, error: Exception) -> None:
    logger.warning("%s; moved to %s, trying an older one", error, set_aside(path))


def checkpoint_hashes(root: Path) -> dict[int, str]:
    """Return the weights hash of each checkpoint that can be read, by step, ascending."""
    hashes: dict[int, str] = {}
    for step in list_checkpoints(root):
        with suppress(OSError, ValueError, TypeError):  # damaged: older ones remain
            hashes[step] = read_checkpoint_state(checkpoint_path(root, step)).weights_hash
    return hashes


def record_fork(path: Path, fork: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(fork) + "\n")


def read_forks(path: Path) -> list[dict[str, Any]]:
    """Return the replayed steps whose weights differ from the ledger's, oldest first."""
    forks = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with suppress(ValueError):  # an audit reports a damaged line
            forks.append(json.loads(line))
    return forks


def forked_policies(path: Path) -> dict[int, list[PolicyHashes]]:
    """Return the policies of replayed steps that differ from the ledger's, by step."""
    policies: dict[int, list[PolicyHashes]] = {}
    for fork in read_forks(path):
        with suppress(KeyError, TypeError):
            policies.setdefault(fork["step"], []).append(PolicyHashes(**fork["replayed"]))
    return policies


def is_recorded(step: int, weights_hash: str, row: Mapping[str, Any], forks: Path) -> bool:
    """Return whether weights are those of a step, in its ledger row or in a replay that forked."""
    forked = forked_policies(forks).get(step, ())
    return weights_hash in (row["weights_hash"], *(policy.weights_hash for policy in forked))


def prune_checkpoints(root: Path, *, keep: int, protected: Set[Path] = frozenset()) -> list[Path]:
    """Remove all but step 0, the newest `keep` and the protected; return the removed ones.

    Each is renamed first, so that no half removed checkpoint looks complete.
    """
    old = [checkpoint_path(root, step) for step in list_checkpoints(root)[1:-keep]]
    pruned = [path for path in old if path not in protected]
    for path in pruned:
        path.rename(path.with_name(f".pruned-{path.name}"))
    for leftover in root.glob(".pruned-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    return pruned
