"""Deltas of weights: whatever changed arrives to the bit."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from areal_flow.policy.models.hashing import hash_tensors
from areal_flow.policy.weights.delta import (
    BLOCK_SIZE,
    TensorDelta,
    apply_delta,
    are_alike,
    tensor_delta,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8)
SIZES = (1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 4001)


def any_bits(generator: torch.Generator, size: int, dtype: torch.dtype) -> Tensor:
    """Return values of any bits: NaNs, infinities and both zeros among them."""
    num_bytes = size * dtype.itemsize
    return torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8).view(dtype)


def make_delta(base: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, TensorDelta]:
    return {name: tensor_delta(base[name], weights[name]) for name in base}


def num_different(before: Tensor, after: Tensor) -> int:
    pairs = zip(before.view(torch.uint8), after.view(torch.uint8), strict=True)
    bytes_differ = torch.tensor([bool(left != right) for left, right in pairs])
    return int(bytes_differ.view(-1, before.element_size()).any(1).sum())


@pytest.mark.parametrize("seed", range(40))
def test_any_change_arrives_bit_for_bit(seed: int) -> None:
    chosen, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    base, weights = {}, {}
    for name in "abc":
        size, dtype = chosen.choice(SIZES), chosen.choice(DTYPES)
        before, after = (any_bits(generator, size, dtype) for _ in range(2))
        changes = torch.rand(size, generator=generator) < chosen.choice((0.0, 0.01, 0.5, 1.0))
        base[name], weights[name] = before, torch.where(changes, after, before)
    delta = make_delta(base, weights)
    num_changed = sum(len(changed.moves_C) for changed in delta.values())
    assert num_changed == sum(num_different(base[name], weights[name]) for name in base)
    apply_delta(base, delta)
    assert hash_tensors(base) == hash_tensors(weights)


def test_deltas_keep_shapes_and_signs_of_zero() -> None:
    arrived = {"scalar": torch.tensor(1.0), "matrix": torch.zeros(3, 5)}
    weights = {"scalar": torch.tensor(-0.0), "matrix": torch.eye(3, 5)}
    apply_delta(arrived, make_delta(arrived, weights))
    assert torch.equal(arrived["matrix"], torch.eye(3, 5))
    assert arrived["scalar"].shape == ()
    assert arrived["scalar"].signbit()


def test_golden_size_is_two_bytes_a_change_to_a_near_value_and_one_a_block() -> None:
    base = {"a": torch.ones(10 * BLOCK_SIZE, dtype=torch.bfloat16)}
    weights = {"a": base["a"].clone()}
    weights["a"][[0, 254, 255]] = torch.tensor([1 + 2**-7, 1 - 2**-8, 2.0 - 2**-7]).bfloat16()
    weights["a"][2549] = -1.0
    changed = make_delta(base, weights)["a"]
    assert changed.counts_K.tolist() == [2, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    assert changed.offsets_C.tolist() == [0, 254, 0, 254]
    assert changed.moves_C.tolist() == [1, -1, 127, -128]
    assert changed.far_F.view(torch.bfloat16).tolist() == [-1.0]
    assert changed.nbytes == 10 + 4 * 2 + 2


@pytest.mark.parametrize(
    "other", [{"b": torch.zeros(9)}, {"a": torch.zeros(3, 3)}, {"a": torch.zeros(9).bfloat16()}]
)
def test_versions_of_other_policies_are_not_alike(other: dict[str, Tensor]) -> None:
    assert are_alike({"a": torch.zeros(9)}, {"a": torch.ones(9)})
    assert not are_alike({"a": torch.zeros(9)}, other)
