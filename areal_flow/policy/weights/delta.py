"""The changed bits between two versions of weights; a small step changes few bfloat16 values.

A tensor is cut into blocks of 255 values. A delta has the number of changes in each block, the
position of each change in its block, and how far its bits, read as an integer, moved: a value that
becomes its neighbour moves by 1. That is 2 bytes per change and 1 byte per block. Bits that moved
too far for a byte are stored in full.

Letters: N values of a tensor, K blocks, C changes, F changes that moved far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

BLOCK_SIZE = 255
"""In values, so that a count and a position within a block fit into a byte each."""

_FAR = -128
"""Marks a move that does not fit into a byte."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types of a value's bits, by its number of bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorDelta:
    counts_K: Tensor
    """Number of changes in each block, uint8."""
    offsets_C: Tensor
    """Position of each change in its block, uint8."""
    moves_C: Tensor
    """How far the bits of each change moved, int8."""
    far_F: Tensor
    """The new bits of changes that moved further."""

    def parts(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts().values())


def are_alike(base: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
    described = [{n: (t.dtype, t.shape) for n, t in tensors.items()} for tensors in (base, weights)]
    return described[0] == described[1]


def is_delta_candidate(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether few values may change: those of larger types nearly all do."""
    return all(tensor.element_size() <= 2 for tensor in tensors.values())


def tensor_delta(base: Tensor, tensor: Tensor) -> TensorDelta:
    bits_N, base_N = _bits(tensor), _bits(base)
    # NumPy finds the few differences in a third of torch's time.
    positions_C = torch.from_numpy(np.flatnonzero(base_N.numpy() != bits_N.numpy()))
    blocks_C = positions_C // BLOCK_SIZE
    num_blocks = -(-len(bits_N) // BLOCK_SIZE)
    bits_C = bits_N[positions_C]
    moves_C = bits_C - base_N[positions_C]
    is_far_C = (moves_C <= _FAR) | (moves_C > -_FAR - 1)
    return TensorDelta(
        torch.bincount(blocks_C, minlength=num_blocks).to(torch.uint8),
        (positions_C - blocks_C * BLOCK_SIZE).to(torch.uint8),
        moves_C.masked_fill_(is_far_C, _FAR).to(torch.int8),
        bits_C[is_far_C],
    )


def apply_delta(tensors: Mapping[str, Tensor], delta: Mapping[str, TensorDelta]) -> None:
    """Change tensors in place, bit by bit."""
    for name, changed in delta.items():
        starts_K = torch.arange(len(changed.counts_K)) * BLOCK_SIZE
        positions_C = starts_K.repeat_interleave(changed.counts_K.long()) + changed.offsets_C
        bits_N = _bits(tensors[name])
        bits_N[positions_C] += changed.moves_C
        bits_N[positions_C[changed.moves_C == _FAR]] = changed.far_F


def labelled_parts(delta: Mapping[str, TensorDelta]) -> dict[str, Tensor]:
    """Return a delta as tensors of one file."""
    return {
        f"{part}:{name}": tensor
        for name, changed in delta.items()
        for part, tensor in changed.parts().items()
    }


def delta_of_parts(labelled: Mapping[str, Tensor]) -> dict[str, TensorDelta]:
    parts: dict[str, dict[str, Tensor]] = {}
    for label, tensor in labelled.items():
        part, _, name = label.partition(":")
        parts.setdefault(name, {})[part] = tensor
    return {name: TensorDelta(**fields) for name, fields in parts.items()}


def _bits(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor's bits, `[N]`: a NaN equals itself, 0 is not -0."""
    return tensor.view(-1).view(_BITS[tensor.element_size()])
