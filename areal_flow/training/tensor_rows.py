"""Tensors of which each process has some rows: in memory, in a file that all write, or in a model.

The rows of a tensor are consecutive bytes: nothing is gathered, and any number of processes write
and read a file. Of a model directory each process reads its own rows.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_flow.core.errors import ModelError
from areal_flow.policy.checkpoints import ADAPTER_FILE, MODEL_FILE
from areal_flow.policy.models.huggingface import conversion_mapping
from areal_flow.policy.models.huggingface import core_model_loading as loading
from areal_flow.policy.models.policy import empty_policy, load_policy, policy_tensors
from areal_flow.policy.models.reward_model import SCORE, drawn_scores, reward_model_of
from areal_flow.policy.weights.tensor_file import file_header
from areal_flow.training.replicas import raise_trainer_lost

logger = logging.getLogger(__name__)

INDEX_FILE = f"{MODEL_FILE}.index.json"
"""Where a model directory has several files: which of them has which tensor."""

ALL_ROWS = 1 << 40
"""More than any tensor has."""

RowReader = Callable[[int, int], Tensor]
"""Returns rows of a tensor, by the first one and their number; a scalar is whole."""

TensorReaders = Mapping[str, RowReader]
"""Tensors by name, of which a process takes the rows that it has."""


BeginCopy = Callable[[Tensor, Tensor], object]
"""Starts to copy the first tensor into the second one."""


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Consecutive rows of a tensor, in main memory; a scalar is whole."""

    values: Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    first_row: int = 0

    def __call__(self, first_row: int, num_rows: int) -> Tensor:
        begin = first_row - self.first_row
        return self.values[begin : begin + num_rows] if self.shape else self.values

    @property
    def first_byte(self) -> int:
        return self.first_row * prod(self.shape[1:]) * self.values.element_size()


def whole_rows(tensors: Mapping[str, Tensor]) -> dict[str, TensorRows]:
    return {name: TensorRows(tensor, tuple(tensor.shape)) for name, tensor in tensors.items()}


def own_rows(tensors: Mapping[str, Tensor]) -> dict[str, TensorRows]:
    """Return this process's rows of tensors, as views."""
    rows = {}
    for name, tensor in tensors.items():
        local, first_row = local_rows(tensor)
        rows[name] = TensorRows(local.detach(), tuple(tensor.shape), first_row)
    return rows


def copied_rows(
    tensors: Mapping[str, Tensor], begin_copy: BeginCopy | None = None
) -> dict[str, TensorRows]:
    """Return a copy of this process's rows; empty in all but the first copy of a model.

    Args:
        begin_copy: makes the copies later; without it, they are made now.
    """
    copies = {}
    for name, rows in own_rows(tensors).items():
        tensor, values = tensors[name], rows.values
        if isinstance(tensor, DTensor) and any(_coordinate(tensor)[:-1]):
            values = values[:0]
        if begin_copy:
            copy = torch.empty(values.shape, dtype=values.dtype)
            begin_copy(values, copy)
        else:
            copy = values.to("cpu", copy=True).contiguous()
        copies[name] = replace(rows, values=copy)
    return copies


def rows_in_files(*paths: Path) -> TensorReaders:
    opened = [cast("Any", safe_open(path, framework="pt")) for path in paths]
    return {name: partial(_read_rows, file, name) for file in opened for name in file.keys()}  # noqa: SIM118


def _read_rows(file: Any, name: str, first_row: int, num_rows: int) -> Tensor:
    stored = file.get_slice(name)
    if not stored.get_shape():
        return file.get_tensor(name)  # type: ignore[no-any-return]
    return stored[first_row : first_row + num_rows]  # type: ignore[no-any-return]


def strip_prefix(prefix: str, rows: TensorReaders) -> TensorReaders:
    return {n.removeprefix(prefix): rows[n] for n in rows if n.startswith(prefix)}


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return this process's rows of a tensor, and the number of the first one."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh, num_rows = tensor.device_mesh, tensor.shape[0]  # of shards, or of copies and their shards
    rows_each = -(-num_rows // mesh.size(-1))  # as torch splits them: the last ranks may have fewer
    return tensor.to_local(), min(_coordinate(tensor)[-1] * rows_each, num_rows)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor with the rows of all ranks, which all call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    with raise_trainer_lost():
        return tensor.full_tensor()


def _coordinate(tensor: DTensor) -> Sequence[int]:
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this process is in the mesh of its model"
    return coordinate


def write_rows(
    file: Path, tensors: Mapping[str, TensorRows], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write this process's rows into a file that all processes write, and flush it to disk."""
    like = {
        name: torch.empty(rows.shape, dtype=rows.values.dtype, device="meta")
        for name, rows in tensors.items()
    }
    header, offsets = file_header(like, metadata=metadata)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    with os.fdopen(descriptor, "r+b") as opened:
        opened.truncate(len(header) + sum(tensor.nbytes for tensor in like.values()))
        opened.write(header)
        for name, rows in tensors.items():
            opened.seek(offsets[name] + rows.first_byte)
            opened.write(rows.values.contiguous().flatten().view(torch.uint8).numpy().data)
        opened.flush()
        os.fsync(descriptor)


def first_model(
    directory: Path, *, seed: int, device: str, reward_model: Path | None = None
) -> tuple[Any, TensorReaders | None]:
    """Return a directory's policy, or a reward model with its layers; what is not there is drawn.

    The weights of a policy that has any come apart from it.

    Args:
        reward_model: the directory of the reward model's configuration.
    """
    torch.manual_seed(seed)
    make = (
        partial(reward_model_of, reward_model) if reward_model else partial(empty_policy, directory)
    )
    if not any(directory.glob("*.safetensors")):
        return make(device=device), None
    model = make(device="meta")
    drawn = {f"{SCORE}.weight": drawn_scores(model)} if reward_model else {}
    return model, _rows(directory, model, whole_rows(drawn))


def pretrained_policy(directory: Path) -> tuple[Any, TensorReaders]:
    """Return a directory's policy on the meta device, and its weights."""
    policy = shapes_of(directory)
    return policy, _rows(directory, policy, {})


def shapes_of(directory: Path) -> Any:
    """Return a directory's architecture on the meta device."""
    return empty_policy(directory, device="meta")


def _rows(directory: Path, model: Any, drawn: TensorReaders) -> TensorReaders:
    """Return the rows of a model's tensors; those of `drawn` may be missing."""
    try:
        files = {MODEL_FILE}
        if (index := directory / INDEX_FILE).is_file():
            files = {*json.loads(index.read_text())["weight_map"].values()}
        stored = rows_in_files(*(directory / name for name in files))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"expected a Hugging Face model directory with config.json and safetensors, "
            f"found {directory}: {error}"
        ) from error
    expected, available = policy_tensors(model), {**drawn, **stored}
    if not (directory / ADAPTER_FILE).is_file():
        if not expected.keys() <= available.keys():
            available = {**drawn, **renamed_rows(stored, model)}
        if expected.keys() <= available.keys():
            return {name: available[name] for name in expected}
    # An adapter that is to be merged, or tensors that are parts of those in the files.
    logger.warning("%s: its tensors have other names, so each rank loads it whole", directory)
    return whole_rows(policy_tensors(load_policy(directory)))


def renamed_rows(stored: TensorReaders, model: Any) -> TensorReaders:
    """Return a model's tensors from files that name them in another way, or have parts of them.

    Tensors that are one of several in a file's tensor are left out.
    """
    shapes, transforms = model.state_dict(), conversion_mapping.get_model_conversion_mapping(model)
    converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    parts: dict[str, dict[str | None, list[str]]] = {}
    for key in sorted(stored, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(
            key, renamings, converters, model.base_model_prefix, shapes
        )
        parts.setdefault(name, {}).setdefault(pattern, []).append(key)
    renamed: dict[str, RowReader] = {}
    for name, by_pattern in parts.items():
        converter = of_pattern.get(next(iter(by_pattern)) or "")
        if converter is None:
            renamed[name] = stored[by_pattern[None][0]]
        elif name in shapes and len(converter.target_patterns) == 1:
            keys = {str(pattern): keys for pattern, keys in by_pattern.items()}
            renamed[name] = partial(
                _fused, stored, converter, keys, name, shapes[name].shape, model
            )
    return renamed


def _fused(
    stored: TensorReaders,
    converter: Any,
    keys: Mapping[str, Sequence[str]],
    name: str,
    shape: Sequence[int],
    model: Any,
    first_row: int,
    num_rows: int,
) -> Tensor:
    """Return rows of a tensor that is made of several, `keys` by pattern.

    Of stacked experts, a row each, those of the rows are read; else the whole tensor is made.
    """
    if not num_rows:
        return torch.empty(0, *shape[1:])
    stack, *others = converter.operations
    by_row = isinstance(stack, loading.MergeModulelist) and stack.dim == 0
    by_row = by_row and all(isinstance(op, loading.Concatenate) and op.dim > 0 for op in others)
    rows = slice(first_row, first_row + num_rows)
    made = deepcopy(converter)
    for pattern, of_pattern in keys.items():
        for key in of_pattern[rows] if by_row else of_pattern:
            made.add_tensor(name, key, pattern, partial(stored[key], 0, ALL_ROWS))
    (tensor,) = made.convert(name, model=model, config=model.config).values()
    return tensor if by_row else tensor[rows]  # type: ignore[no-any-return]
