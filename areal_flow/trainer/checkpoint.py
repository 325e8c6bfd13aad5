"""A trainer's state as a directory: complete or absent, and a plain Hugging Face model at that.

checkpoints/00000020/
    config.json model.safetensors tokenizer.json ...   what `export` and MLflow hand out
    optimizer.safetensors                              AdamW's state and torch's RNG
    state.json                                         step, hashes, prompt cursor
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from areal_flow.durable import force_to_disk
from areal_flow.errors import StorageError, TrainingError
from areal_flow.models.policy import assign_tensors
from areal_flow.recovery.checkpoints import (
    RNG_STATE,
    CheckpointState,
    checkpoint_path,
    read_checkpoint_state,
    set_aside,
)
from areal_flow.recovery.lease import Writer
from areal_flow.trainer.state import TrainerState
from areal_flow.types import PolicyHashes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a trainer's state, to be written while the trainer goes on."""

    tensors: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    description: CheckpointState


def take_snapshot(state: TrainerState, description: CheckpointState) -> Snapshot:
    """Copy what a checkpoint holds to the CPU's memory."""
    optimizer = {**state.optimizer_tensors(), RNG_STATE: torch.get_rng_state()}
    return Snapshot(_copies(state.tensors()), _copies(optimizer), description)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }


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
        save_file(snapshot.tensors, partial / "model.safetensors", metadata={"format": "pt"})
        save_file(snapshot.optimizer, partial / "optimizer.safetensors")
        (partial / "state.json").write_text(json.dumps(asdict(snapshot.description), indent=2))
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


def read_checkpoint(path: Path, state: TrainerState) -> CheckpointState:
    """Load a checkpoint into a trainer's state and check both hashes.

    Raises:
        TrainingError: the files are unreadable or not what was written.
    """
    try:
        description = read_checkpoint_state(path)
        tensors = load_file(path / "model.safetensors")
        optimizer = load_file(path / "optimizer.safetensors")
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise TrainingError(f"checkpoint {path} cannot be read: {error}") from error
    torch.set_rng_state(optimizer.pop(RNG_STATE))
    assign_tensors(state.policy, tensors)
    state.load_optimizer_tensors(optimizer)
    found = (state.weights_hash(), state.optimizer_hash())
    if found != (description.weights_hash, description.optimizer_hash):
        raise TrainingError(f"checkpoint {path} was changed after it was written: hashes differ")
    return description


def describe(
    state_hashes: PolicyHashes, *, step: int, next_submission_index: int, config_hash: str
) -> CheckpointState:
    """Return the description of a checkpoint of these hashes."""
    return CheckpointState(
        step,
        state_hashes.weights_hash,
        state_hashes.optimizer_hash,
        next_submission_index,
        config_hash,
    )
