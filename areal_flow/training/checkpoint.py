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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError

from areal_flow.core.durable import force_to_disk
from areal_flow.core.errors import StorageError, TrainingError
from areal_flow.core.lease import Writer
from areal_flow.policy.checkpoints import (
    ADAPTER_FILE,
    MODEL_FILE,
    RNG_STATE,
    CheckpointState,
    checkpoint_path,
    read_checkpoint_state,
    set_aside,
    weight_files,
)
from areal_flow.policy.models.hashing import hash_files
from areal_flow.policy.models.lora import split_adapter
from areal_flow.policy.settings import LoraSettings
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.ranked_model import Copies, wait_for_copies
from areal_flow.training.tensor_rows import TensorReaders, TensorRows, rows_in_files, write_rows

OPTIMIZER_FILE = "optimizer.safetensors"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of this process's rows of a trainer's state, made and written while it goes on."""

    weights: dict[str, TensorRows]
    optimizer: dict[str, TensorRows]
    description: CheckpointState
    """Without the optimizer's hash: it is computed when the snapshot is written."""
    random_state: TensorRows
    """torch's: the leader writes its own."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Of the adapter, if the policy has one."""
    attempt: str = ""
    """A name of the ranks that write together."""
    copies: Copies = ()
    """What weights and optimizer are copied by: complete once all have ended."""


def take_snapshot(
    backend: TrainerBackend, description: CheckpointState, lora: LoraSettings | None = None
) -> Snapshot:
    """Begin to copy a trainer's state; its next update waits until that is done."""
    replicas, state = backend.replicas, torch.get_rng_state()
    random_state = TensorRows(state if replicas.is_leader else state[:0], tuple(state.shape))
    saved, copies = backend.begin_save()
    return Snapshot(
        *saved,
        description,
        random_state,
        lora or LoraSettings(),
        attempt=replicas.name,
        copies=copies,
    )


def write_checkpoint(root: Path, model_directory: Path, snapshot: Snapshot, writer: Writer) -> Path:
    write_part(root, snapshot, writer)
    return complete_checkpoint(root, model_directory, snapshot, writer)


def write_part(root: Path, snapshot: Snapshot, writer: Writer) -> None:
    """Write this process's rows, once they are copied."""
    wait_for_copies(snapshot.copies)
    partial = _partial(root, snapshot, writer)
    weights, adapter = split_adapter(snapshot.weights)
    optimizer = {**snapshot.optimizer, RNG_STATE: snapshot.random_state}
    with _storage_errors(root, snapshot):
        partial.mkdir(parents=True, exist_ok=True)
        if not adapter or snapshot.description.step == 0:
            write_rows(partial / MODEL_FILE, weights, metadata={"format": "pt"})
        if adapter:
            metadata = {"format": "pt", "lora": snapshot.lora.model_dump_json()}
            write_rows(partial / ADAPTER_FILE, adapter, metadata=metadata)
        write_rows(partial / OPTIMIZER_FILE, optimizer)


def complete_checkpoint(
    root: Path, model_directory: Path, snapshot: Snapshot, writer: Writer
) -> Path:
    """Rename a checkpoint into place, once every process has written its part."""
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
    """Return the hash of the optimizer's file; check that of the weights first."""
    expected, has_base = snapshot.description.weights_hash, (partial / MODEL_FILE).is_file()
    if has_base and (actual := hash_files(*weight_files(partial))) != expected:
        raise StorageError(
            f"checkpoint {snapshot.description.step}: expected weights {expected}, the ranks wrote "
            f"{actual}: is {partial.parent} the same directory on all their hosts? Older "
            "checkpoints are intact"
        )
    return hash_files(partial / OPTIMIZER_FILE, without={RNG_STATE})


def _target(root: Path, snapshot: Snapshot) -> Path:
    return checkpoint_path(root, snapshot.description.step)


def _partial(root: Path, snapshot: Snapshot, writer: Writer) -> Path:
    """Return the directory of this attempt: restored ranks write to another one."""
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
    """Load a checkpoint; a process holds one tensor at a time, and its own rows."""
    optimizer, weights = _read(path, "optimizer"), read_weights(path)
    torch.set_rng_state(optimizer[RNG_STATE](0, len(torch.get_rng_state())))
    backend.load(weights, optimizer)
    return read_checkpoint_state(path)


def read_weights(path: Path) -> TensorReaders:
    return _read(path, "weights")


def _read(path: Path, kind: Literal["weights", "optimizer"]) -> TensorReaders:
    try:
        files = weight_files(path) if kind == "weights" else [path / OPTIMIZER_FILE]
        expected = getattr(read_checkpoint_state(path), f"{kind}_hash")
        actual, rows = hash_files(*files, without={RNG_STATE}), rows_in_files(*files)
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise TrainingError(f"checkpoint {path} cannot be read: {error}") from error
    if actual != expected:
        raise TrainingError(f"checkpoint {path} was changed after it was written: hashes differ")
    return rows
