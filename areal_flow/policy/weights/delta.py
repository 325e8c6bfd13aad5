"""What changed between two versions of weights, bit by bit; a small step changes few bfloat16.

A tensor is cut into blocks of 255 values: how many changed in each block, where in it, and how far
each one's bits moved, read as an integer: a value that goes to its neighbour moves by 1. That is 2
bytes a change and 1 byte a block; bits that moved too far for a byte follow whole. Pure: how deltas
travel is left to a medium.

Letters: N values of a tensor, K blocks, C changes, F changes that moved far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

BLOCK_SIZE = 255
"""Values; so that both a count and a position within a block are one byte."""

_FAR = -128
"""A move that stands for one that does not fit into a byte."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The type that has the bits of a value, by its number of bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorDelta:
    counts_K: Tensor
    """Changes in each block, uint8."""
    offsets_C: Tensor
    """Where in its block each change is, uint8."""
    moves_C: Tensor
    """How far the bits moved, int8."""
    far_F: Tensor
    """The bits of those that moved further."""

    def parts(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts().values())


def are_alike(base: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
    described = [{n: (t.dtype, t.shape) for n, t in tensors.items()} for tensors in (base, weights)]
    return described[0] == described[1]


def is_delta_candidate(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether it may be worth the time to look for what has changed."""
    return all(tensor.element_size() <= 2 for tensor in tensors.values())


def is_smaller(
    delta: Mapping[str, TensorDelta], weights: Mapping[str, Tensor], *, beside_bytes: int = 0
) -> bool:
    num_bytes = beside_bytes + sum(changed.nbytes for changed in delta.values())
    return num_bytes < sum(tensor.nbytes for tensor in weights.values())


def make_delta(base: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, TensorDelta]:
    assert are_alike(base, weights), "versions of other policies have no delta"
    return {name: tensor_delta(base[name], weights[name]) for name in base}


def tensor_delta(base: Tensor, tensor: Tensor) -> TensorDelta:
    bits_N, base_N = _bits(tensor), _bits(base)
    # NumPy's search for the few that differ takes a third of torch's time.
    positions_C = torch.from_numpy(np.flatnonzero(base_N.numpy() != bits_N.numpy()))
    blocks_C = positions_C // BLOCK_SIZE
    num_blocks = -(-len(bits_N) // BLOCK_SIZE)
    now_C = bits_N[positions_C]
    moves_C = now_C - base_N[positions_C]
    is_far_C = (moves_C <= _FAR) | (moves_C > -_FAR - 1)
    return TensorDelta(
        torch.bincount(blocks_C, minlength=num_blocks).to(torch.uint8),
        (positions_C - blocks_C * BLOCK_SIZE).to(torch.uint8),
        moves_C.masked_fill_(is_far_C, _FAR).to(torch.int8),
        now_C[is_far_C],
    )


def apply_delta(tensors: Mapping[str, Tensor], delta: Mapping[str, TensorDelta]) -> None:
    """Change tensors in place, bit by bit."""
    for name, changed in delta.items():
        bits_N, positions_C = _bits(tensors[name]), _changed_positions(changed)
        bits_N[positions_C] += changed.moves_C
        bits_N[positions_C[changed.moves_C == _FAR]] = changed.far_F


def labelled_parts(delta: Mapping[str, TensorDelta]) -> dict[str, Tensor]:
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
    return {name: TensorDelta(**of) for name, of in parts.items()}


def _changed_positions(delta: TensorDelta) -> Tensor:
    starts_K = torch.arange(len(delta.counts_K)) * BLOCK_SIZE
    return starts_K.repeat_interleave(delta.counts_K.long()) + delta.offsets_C


def _bits(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor's bits, `[N]`: a NaN equals itself, 0 is not -0."""
    return tensor.view(-1).view(_BITS[tensor.element_size()])
