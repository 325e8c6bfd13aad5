"""A trainer's state as a directory, complete or absent, that is a plain Hugging Face model as well.

checkpoints/00000020/
    config.json model.safetensors tokenizer.json ...   what `export` and MLflow hand out
    optimizer.safetensors                              AdamW's state and torch's RNG
    state.json                                         step, hashes, prompt cursor

Where an adapter is trained, `adapter.safetensors` has it, and `model.safetensors`, which it adapts
and which never changes, is in the checkpoint of step 0 alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from areal_flow.config import LoraSettings
from areal_flow.errors import StorageError, TrainingError
from areal_flow.models.hashing import hash_files, hash_tensors
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
from areal_flow.run.durable import force_to_disk
from areal_flow.run.lease import Writer
from areal_flow.trainer.backend import LoadsRows, SavedRows, SavedState, TrainerBackend
from areal_flow.trainer.tensor_rows import RowsFile, write_rows

OPTIMIZER_FILE = "optimizer.safetensors"

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a trainer's state, to be written while the trainer goes on."""

    saved: SavedState | SavedRows
    """All of it, or what this process has."""
    description: CheckpointState
    """Without the optimizer's hash: it is computed when the snapshot is written."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Of the adapter, if the policy has one."""
    random_state: Any = field(default_factory=torch.get_rng_state)
    """torch's; rows of it where the rest is rows."""
    attempt: str = ""
    """A name of the ranks that write together."""


def write_checkpoint(root: Path, model_directory: Path, snapshot: Snapshot, writer: Writer) -> Path:
    write_part(root, snapshot, writer)
    return complete_checkpoint(root, model_directory, snapshot, writer)


def write_part(root: Path, snapshot: Snapshot, writer: Writer) -> None:
    partial = _partial(root, snapshot, writer)
    saved = snapshot.saved
    with _storage_errors(root, snapshot):
        partial.mkdir(parents=True, exist_ok=True)
        if isinstance(saved, SavedRows):
            write_rows(partial / MODEL_FILE, saved.weights, metadata={"format": "pt"})
            random_state = {RNG_STATE: snapshot.random_state}
            write_rows(partial / OPTIMIZER_FILE, saved.optimizer | random_state)
            return
        weights, adapter = split_adapter(saved.weights)
        if not adapter or snapshot.description.step == 0:
            save_file(weights, partial / MODEL_FILE, metadata={"format": "pt"})
        if adapter:
            metadata = {"format": "pt", "lora": snapshot.lora.model_dump_json()}
            save_file(adapter, partial / ADAPTER_FILE, metadata=metadata)
        optimizer = {**saved.optimizer, RNG_STATE: snapshot.random_state}
        save_file(optimizer, partial / OPTIMIZER_FILE)


def complete_checkpoint(
    root: Path, model_directory: Path, snapshot: Snapshot, writer: Writer
) -> Path:
    """Rename a checkpoint into place of which every process has written its part."""
    partial, target = _partial(root, snapshot, writer), _target(root, snapshot)
    with _storage_errors(root, snapshot):
        without_weights = shutil.ignore_patterns("*.safetensors")
        shutil.copytree(model_directory, partial, dirs_exist_ok=True, ignore=without_weights)
        description = replace(
            snapshot.description, optimizer_hash=_optimizer_hash(partial, snapshot)
        )
        (partial / "state.json").write_text(json.dumps(asdict(description), indent=2))
        for file in partial.iterdir():
            force_to_disk(file)
        writer.check_current()
        if target.exists():
            shutil.rmtree(set_aside(target))
        partial.rename(target)
        force_to_disk(root)
        for leftover in root.glob(f".partial-*-{writer.writer_epoch}"):
            shutil.rmtree(leftover, ignore_errors=True)  # of ranks that were lost while they wrote
    return target


def _optimizer_hash(partial: Path, snapshot: Snapshot) -> str:
    saved, expected = snapshot.saved, snapshot.description.weights_hash
    if not isinstance(saved, SavedRows):
        return hash_tensors(saved.optimizer)
    if (found := hash_files(partial / MODEL_FILE)) != expected:
        raise StorageError(
            f"checkpoint {snapshot.description.step}: expected weights {expected}, the ranks wrote "
            f"{found}: is {partial.parent} the same directory on all their hosts? Older "
            "checkpoints are intact"
        )
    return hash_files(partial / OPTIMIZER_FILE, without={RNG_STATE})


def _target(root: Path, snapshot: Snapshot) -> Path:
    return checkpoint_path(root, snapshot.description.step)


def _partial(root: Path, snapshot: Snapshot, writer: Writer) -> Path:
    """Return where a checkpoint is written: ranks that were restored since write elsewhere."""
    name, attempt = _target(root, snapshot).name, snapshot.attempt
    return root / f".partial-{name}-{attempt}-{writer.writer_epoch}"


@contextmanager
def _storage_errors(root: Path, snapshot: Snapshot) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"could not write checkpoint {_target(root, snapshot)}: {error}. Older checkpoints are "
            "intact: free some space, then continue with --resume"
        ) from error


def read_checkpoint(path: Path, backend: TrainerBackend) -> CheckpointState:
    if backend.is_sharded:
        return _read_rows(path, cast("LoadsRows", backend))
    description, optimizer = _read(path, lambda path: load_file(path / OPTIMIZER_FILE))
    random_state = optimizer.pop(RNG_STATE)
    _refuse_unless(hash_tensors(optimizer) == description.optimizer_hash, path)
    weights = read_weights(path)
    torch.set_rng_state(random_state)
    backend.load(SavedState(weights, optimizer))
    return description


def _read_rows(path: Path, backend: LoadsRows) -> CheckpointState:
    """A rank holds one tensor at a time, and of most its own rows alone."""

    def hashes(path: Path) -> tuple[str, str]:
        optimizer_hash = hash_files(path / OPTIMIZER_FILE, without={RNG_STATE})
        return hash_files(path / MODEL_FILE), optimizer_hash

    description, found = _read(path, hashes)
    _refuse_unless(found == (description.weights_hash, description.optimizer_hash), path)
    weights, optimizer = RowsFile(path / MODEL_FILE), RowsFile(path / OPTIMIZER_FILE)
    torch.set_rng_state(optimizer.rows(RNG_STATE, 0, len(torch.get_rng_state())))
    backend.load_rows(weights, optimizer)
    return description


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    description, weights = _read(path, read_weight_files)
    _refuse_unless(hash_tensors(weights) == description.weights_hash, path)
    return weights


def _read(path: Path, read_tensors: Callable[[Path], Found]) -> tuple[CheckpointState, Found]:
    try:
        return read_checkpoint_state(path), read_tensors(path)
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise TrainingError(f"checkpoint {path} cannot be read: {error}") from error


def _refuse_unless(hash_is_equal: bool, path: Path) -> None:
    if not hash_is_equal:
        raise TrainingError(f"checkpoint {path} was changed after it was written: hashes differ")
