"""A trainer's state as a directory: complete or absent, and a plain Hugging Face model at that.

checkpoints/00000020/
    config.json model.safetensors tokenizer.json ...   what `export` and MLflow hand out
    optimizer.safetensors                              AdamW's state and torch's RNG
    state.json                                         step, hashes, prompt cursor
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from areal_flow.checkpoints import (
    RNG_STATE,
    CheckpointState,
    checkpoint_path,
    read_checkpoint_state,
)
from areal_flow.durable import force_to_disk
from areal_flow.errors import StorageError, TrainingError
from areal_flow.modeling.policy import assign_tensors
from areal_flow.trainer.state import TrainerState
from areal_flow.types import PolicyHashes


def write_checkpoint(
    root: Path, model_directory: Path, state: TrainerState, description: CheckpointState
) -> Path:
    """Write a checkpoint aside, force it to disk, rename it into place.

    Raises:
        StorageError: the disk refused; older checkpoints are intact.
    """
    target = checkpoint_path(root, description.step)
    partial = root / f".partial-{target.name}"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(model_directory, partial)
        save_file(
            {name: tensor.contiguous() for name, tensor in state.tensors().items()},
            partial / "model.safetensors",
            metadata={"format": "pt"},
        )
        optimizer = {name: t.contiguous() for name, t in state.optimizer_tensors().items()}
        optimizer[RNG_STATE] = torch.get_rng_state()
        save_file(optimizer, partial / "optimizer.safetensors")
        (partial / "state.json").write_text(json.dumps(asdict(description), indent=2))
        for file in partial.iterdir():
            force_to_disk(file)
        shutil.rmtree(target, ignore_errors=True)
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
