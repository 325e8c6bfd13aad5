"""What changed between two versions of weights, bit by bit; a small step changes few bfloat16.

A tensor is cut into blocks of 255 values: how many changed in each block, where in it, and their
new bits, are 3 bytes a change and 1 byte a block. Pure: how deltas travel is left to a medium.

Letters: N values of a tensor, K blocks, C changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_flow.errors import WeightsError
from areal_flow.models.hashing import hash_tensors

BLOCK_SIZE = 255
"""Values; so that both a count and a position within a block are one byte."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The type that has the bits of a value, by its number of bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorDelta:
    """The changes of one tensor."""

    counts_K: Tensor
    """Changes in each block, uint8."""
    offsets_C: Tensor
    """Where in its block each change is, uint8."""
    bits_C: Tensor
    """What is there now."""

    @property
    def nbytes(self) -> int:
        return self.counts_K.nbytes + self.offsets_C.nbytes + self.bits_C.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class WeightsDelta:
    """The changes of a version, and the hashes of what they lead from and to."""

    base_hash: str
    content_hash: str
    tensors: Mapping[str, TensorDelta]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def make_delta(
    base: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    *,
    base_hash: str,
    content_hash: str,
) -> WeightsDelta:
    """Return what leads from one version to another.

    Args:
        base_hash: `hash_tensors` of the base, which its publisher knows.
        content_hash: that of the weights.

    Raises:
        WeightsError: they are not of the same names, types and shapes.
    """
    described = [{n: (t.dtype, t.shape) for n, t in tensors.items()} for tensors in (base, weights)]
    if described[0] != described[1]:
        raise WeightsError(
            f"expected a version of the same {len(base)} tensors, found {len(weights)} of other "
            "names, types or shapes: publish it whole"
        )
    changes = {name: _tensor_delta(base[name], weights[name]) for name in base}
    return WeightsDelta(base_hash, content_hash, changes)


def apply_delta(
    base: Mapping[str, Tensor], delta: WeightsDelta, *, base_hash: str
) -> dict[str, Tensor]:
    """Return the weights that a delta leads to, to the bit; the base stays as it is.

    Args:
        base_hash: of what the receiver has.

    Raises:
        WeightsError: it missed a version, or what came out has another hash.
    """
    if base_hash != delta.base_hash:
        raise WeightsError(
            f"expected weights {delta.base_hash} to change, found {base_hash}: a version was "
            "missed, load the newest one whole"
        )
    weights = {name: tensor.clone() for name, tensor in base.items()}
    for name, changed in delta.tensors.items():
        _bits(weights[name])[_changed_positions(changed)] = changed.bits_C
    found = hash_tensors(weights)
    if found != delta.content_hash:
        raise WeightsError(
            f"expected weights with hash {delta.content_hash} from a delta, found {found}: load "
            "the version whole"
        )
    return weights


def _tensor_delta(base: Tensor, tensor: Tensor) -> TensorDelta:
    bits_N = _bits(tensor)
    positions_C = (_bits(base) != bits_N).nonzero().squeeze(1)
    blocks_C = positions_C // BLOCK_SIZE
    num_blocks = -(-len(bits_N) // BLOCK_SIZE)
    return TensorDelta(
        torch.bincount(blocks_C, minlength=num_blocks).to(torch.uint8),
        (positions_C - blocks_C * BLOCK_SIZE).to(torch.uint8),
        bits_N[positions_C],
    )


def _changed_positions(delta: TensorDelta) -> Tensor:
    """Return where in its tensor each change is, `[C]`."""
    starts_K = torch.arange(len(delta.counts_K)) * BLOCK_SIZE
    return starts_K.repeat_interleave(delta.counts_K.long()) + delta.offsets_C


def _bits(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor's bits, `[N]`: a NaN equals itself, 0 is not -0."""
    return tensor.view(-1).view(_BITS[tensor.element_size()])
