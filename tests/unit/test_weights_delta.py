"""Deltas of weights: whatever changed arrives to the bit, or the receiver is told to load all."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from areal_flow.errors import WeightsError
from areal_flow.models.hashing import hash_tensors
from areal_flow.weights.delta import BLOCK_SIZE, WeightsDelta, apply_delta, make_delta

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8)
SIZES = (1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 4001)


def any_bits(generator: torch.Generator, size: int, dtype: torch.dtype) -> Tensor:
    """Return values of any bits: NaNs, infinities and both zeros among them."""
    num_bytes = size * dtype.itemsize
    return torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8).view(dtype)


def num_different(before: Tensor, after: Tensor) -> int:
    pairs = zip(before.view(torch.uint8), after.view(torch.uint8), strict=True)
    bytes_differ = torch.tensor([bool(one != other) for one, other in pairs])
    return int(bytes_differ.view(-1, before.element_size()).any(1).sum())


def delta_of(base: dict[str, Tensor], weights: dict[str, Tensor]) -> WeightsDelta:
    hashes = {"base_hash": hash_tensors(base), "content_hash": hash_tensors(weights)}
    return make_delta(base, weights, **hashes)


@pytest.mark.parametrize("seed", range(40))
def test_any_change_arrives_to_the_bit(seed: int) -> None:
    chosen, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    base, weights = {}, {}
    for name in "abc":
        size, dtype = chosen.choice(SIZES), chosen.choice(DTYPES)
        before, after = (any_bits(generator, size, dtype) for _ in range(2))
        changes = torch.rand(size, generator=generator) < chosen.choice((0.0, 0.01, 0.5, 1.0))
        base[name], weights[name] = before, torch.where(changes, after, before)
    before_hash = hash_tensors(base)
    delta = delta_of(base, weights)
    arrived = apply_delta(base, delta, base_hash=before_hash)
    assert hash_tensors(arrived) == hash_tensors(weights)
    assert hash_tensors(base) == before_hash
    num_changed = sum(len(changed.bits_C) for changed in delta.tensors.values())
    assert num_changed == sum(num_different(base[name], weights[name]) for name in base)


def test_shapes_stay() -> None:
    base = {"scalar": torch.tensor(1.0), "matrix": torch.zeros(3, 5)}
    weights = {"scalar": torch.tensor(-0.0), "matrix": torch.eye(3, 5)}
    arrived = apply_delta(base, delta_of(base, weights), base_hash=hash_tensors(base))
    assert torch.equal(arrived["matrix"], torch.eye(3, 5))
    assert arrived["scalar"].shape == ()
    assert arrived["scalar"].signbit()


def test_golden_size_is_three_bytes_a_change_and_one_a_block() -> None:
    base = {"a": torch.zeros(10 * BLOCK_SIZE, dtype=torch.bfloat16)}
    weights = {"a": base["a"].clone()}
    weights["a"][[0, 254, 255, 2549]] = 1.0
    delta = delta_of(base, weights)
    assert delta.tensors["a"].counts_K.tolist() == [2, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    assert delta.tensors["a"].offsets_C.tolist() == [0, 254, 0, 254]
    assert delta.nbytes == 10 + 4 * 3


def test_receiver_that_missed_a_version_is_told_to_load_all() -> None:
    versions = [{"a": torch.full((9,), float(version))} for version in range(3)]
    delta = delta_of(versions[1], versions[2])
    with pytest.raises(WeightsError, match="a version was missed, load the newest one whole"):
        apply_delta(versions[0], delta, base_hash=hash_tensors(versions[0]))


def test_damaged_delta_is_refused() -> None:
    base, weights = {"a": torch.zeros(9)}, {"a": torch.ones(9)}
    delta = delta_of(base, weights)
    delta.tensors["a"].bits_C[3] ^= 1
    with pytest.raises(WeightsError, match=r"from a delta, found .*: load the version whole"):
        apply_delta(base, delta, base_hash=hash_tensors(base))


@pytest.mark.parametrize(
    "other", [{"b": torch.zeros(9)}, {"a": torch.zeros(3, 3)}, {"a": torch.zeros(9).bfloat16()}]
)
def test_version_of_another_policy_is_published_whole(other: dict[str, Tensor]) -> None:
    with pytest.raises(WeightsError, match="publish it whole"):
        delta_of({"a": torch.zeros(9)}, other)
