"""Gathering rows repeatedly: values, gradients, and the same bits with any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from areal_flow.algorithms.gather import GatherIndex, deterministic_gather


def gradient(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    rows = rows.detach().requires_grad_(True)
    deterministic_gather(rows, GatherIndex.of(index, len(rows))).backward(weights)  # type: ignore[no-untyped-call]
    assert rows.grad is not None
    return rows.grad


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 2, 3)])
@pytest.mark.parametrize("index", [[], [3], [6, 6, 6], [5, 0, 2, 0, 5, 5]])
def test_rows_and_their_gradients_are_those_of_an_index(
    shape: tuple[int, ...], index: list[int]
) -> None:
    rows = torch.randn(shape, dtype=torch.float64)
    taken = torch.tensor(index, dtype=torch.int64)
    weights = torch.randn(len(index), *shape[1:], dtype=torch.float64)
    assert torch.equal(deterministic_gather(rows, GatherIndex.of(taken, len(rows))), rows[taken])
    expected = torch.zeros_like(rows).index_add(0, taken, weights)
    assert torch.allclose(gradient(rows, taken, weights), expected, atol=1e-14)


@pytest.mark.usefixtures("two_threads")
def test_gradient_has_the_same_bits_by_two_threads() -> None:
    """PyTorch's own index does not: two threads add to a row in any order."""
    rows = torch.zeros(3000, 128)
    index = torch.tensor([3] * 2000 + [*range(10, 2010)] + [3] * 2000)
    weights = torch.randn(len(index), 128)
    first = gradient(rows, index, weights)
    assert all(torch.equal(gradient(rows, index, weights), first) for _ in range(20))
    torch.set_num_threads(1)
    assert torch.equal(gradient(rows, index, weights), first)
