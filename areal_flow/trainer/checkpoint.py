"""A trainer's state as a directory, complete or absent, that is a plain Hugging Face model as well.

checkpoints/00000020/
    config.json model.safetensors tokenizer.json ...   what `export` and MLflow hand out
    optimizer.safetensors                              AdamW's state and torch's RNG
    state.json                                         step, hashes, prompt cursor

Where an adapter is trained, `adapter.safetensors` has it, and `model.safetensors`, which it adapts
and which never changes, lies in the checkpoint of step 0 alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from areal_flow.config import LoraSettings
from areal_flow.durable import force_to_disk
from areal_flow.errors import StorageError, TrainingError
from areal_flow.models.hashing import hash_tensors
from areal_flow.models.lora import split_adapter
from areal_flow.models.policy import read_weight_files
from areal_flow.recovery.checkpoints import (
    ADAPTER_FILE,
    MODEL_FILE,
    RNG_STATE,
    CheckpointState,
    checkpoint_path,
    read_checkpoint_state,
    set_aside,
)
from areal_flow.recovery.lease import Writer
from areal_flow.trainer.backend import SavedState, TrainerBackend


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a trainer's state, to be written while the trainer goes on."""

    saved: SavedState
    description: CheckpointState
    """Without the optimizer's hash: it is computed when the snapshot is written."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Of the adapter, if the policy has one."""
    random_state: torch.Tensor = field(default_factory=torch.get_rng_state)


def write_checkpoint(root: Path, model_directory: Path, snapshot: Snapshot, writer: Writer) -> Path:
    """Write a checkpoint aside, force it to disk, rename it into place.

    Raises:
        RunError: another driver took over.
        StorageError: the disk refused; older checkpoints are intact.
    """
    target = checkpoint_path(root, snapshot.description.step)
    partial = root / f".partial-{target.name}-{writer.writer_epoch}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(model_directory, partial)
        saved = snapshot.saved
        weights, adapter = split_adapter(saved.weights)
        if not adapter or snapshot.description.step == 0:
            save_file(weights, partial / MODEL_FILE, metadata={"format": "pt"})
        if adapter:
            metadata = {"format": "pt", "lora": snapshot.lora.model_dump_json()}
            save_file(adapter, partial / ADAPTER_FILE, metadata=metadata)
        optimizer = {**saved.optimizer, RNG_STATE: snapshot.random_state}
        save_file(optimizer, partial / "optimizer.safetensors")
        optimizer_hash = hash_tensors(saved.optimizer)
        description = replace(snapshot.description, optimizer_hash=optimizer_hash)
        (partial / "state.json").write_text(json.dumps(asdict(description), indent=2))
        for file in partial.iterdir():
            force_to_disk(file)
        writer.check_current()
        if target.exists():
            shutil.rmtree(set_aside(target))
        partial.rename(target)
        force_to_disk(root)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"could not write checkpoint {target}: {error}. Older checkpoints are intact: free "
            "some space, then continue with --resume"
        ) from error
    return target


def read_checkpoint(path: Path, backend: TrainerBackend) -> CheckpointState:
    """Load a checkpoint into a trainer's backend and check both hashes.

    Raises:
        TrainingError: the files are unreadable or not what was written.
    """
    description, optimizer = _read(path, lambda path: load_file(path / "optimizer.safetensors"))
    random_state = optimizer.pop(RNG_STATE)
    _refuse_unless(hash_tensors(optimizer) == description.optimizer_hash, path)
    weights = read_weights(path)
    torch.set_rng_state(random_state)
    backend.load(SavedState(weights, optimizer))
    return description


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return a checkpoint's weights by name, their hash checked.

    Raises:
        TrainingError: the files are unreadable or not what was written.
    """
    description, weights = _read(path, read_weight_files)
    _refuse_unless(hash_tensors(weights) == description.weights_hash, path)
    return weights


def _read(
    path: Path, read_tensors: Callable[[Path], dict[str, torch.Tensor]]
) -> tuple[CheckpointState, dict[str, torch.Tensor]]:
    try:
        return read_checkpoint_state(path), read_tensors(path)
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise TrainingError(f"checkpoint {path} cannot be read: {error}") from error


def _refuse_unless(hash_is_equal: bool, path: Path) -> None:
    if not hash_is_equal:
        raise TrainingError(f"checkpoint {path} was changed after it was written: hashes differ")
