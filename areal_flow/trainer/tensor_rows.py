"""Tensors of which each process has some rows, in one safetensors file that all write together.

The rows of a tensor are consecutive bytes: nothing is gathered, and any number of processes write
and read it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from areal_flow.weights.tensor_file import file_header


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Consecutive rows of a tensor, in main memory; a scalar is whole."""

    values: Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    first_row: int = 0

    @property
    def first_byte(self) -> int:
        return self.first_row * prod(self.shape[1:]) * self.values.element_size()


def rows_of(tensor: Tensor, *, whole: bool) -> TensorRows:
    """Return all rows of a tensor, or none: one process of many writes what they all have."""
    return TensorRows(tensor if whole else tensor[:0], tuple(tensor.shape))


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


class RowsFile:
    def __init__(self, path: Path) -> None:
        self._opened = cast("Any", safe_open(path, framework="pt"))
        self.names = frozenset(self._opened.keys())

    def rows(self, name: str, first_row: int, num_rows: int) -> Tensor:
        found = self._opened.get_slice(name)
        if not found.get_shape():
            return self._opened.get_tensor(name)  # type: ignore[no-any-return]
        return found[first_row : first_row + num_rows]  # type: ignore[no-any-return]
