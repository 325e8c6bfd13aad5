"""Tensors of which each process has some rows: in memory, or in safetensors files that all write.

The rows of a tensor are consecutive bytes: nothing is gathered, and any number of processes write
and read a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_flow.policy.weights.tensor_file import file_header
from areal_flow.training.replicas import raise_trainer_lost

RowReader = Callable[[int, int], Tensor]
"""Returns rows of a tensor, by the first one and their number; a scalar is whole."""

TensorReaders = Mapping[str, RowReader]
"""Tensors by name, of which a process takes the rows that it has."""


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
    """Return this process's rows of tensors, which change as these do."""
    rows = {}
    for name, tensor in tensors.items():
        local, first_row = local_rows(tensor)
        rows[name] = TensorRows(local.detach(), tuple(tensor.shape), first_row)
    return rows


def copied_rows(tensors: Mapping[str, Tensor]) -> dict[str, TensorRows]:
    """Return a copy of this process's rows of tensors; of those of a second replica, none."""
    copies = {}
    for name, rows in own_rows(tensors).items():
        tensor, values = tensors[name], rows.values
        if isinstance(tensor, DTensor) and any(_coordinate(tensor)[:-1]):
            values = values[:0]
        copies[name] = replace(rows, values=values.to("cpu", copy=True).contiguous())
    return copies


def rows_in_files(*paths: Path) -> TensorReaders:
    """Return the tensors of safetensors files."""
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
    """Write this process's rows of tensors that all processes have; they are on disk then."""
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
