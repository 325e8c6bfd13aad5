"""Copies through pinned buffers: the same bytes, in order, a bounded part of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait

import pytest
import torch

from areal_flow.policy.weights import device_copies
from areal_flow.policy.weights.device_copies import DeviceCopier, on_device
from tests.unit.test_tensor_file import every_type

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "PIECE_BYTES", 7)


@pytest.mark.parametrize("is_inference", [False, True])
def test_tensors_arrive_in_order_with_their_bytes(is_inference: bool) -> None:
    tensors = {**every_type(), "across": torch.rand(6, 4).mT}
    with torch.inference_mode(is_inference):
        arrived = dict(on_device(tensors.items(), CPU))
    assert [*arrived] == [*tensors]
    for name, tensor in tensors.items():
        assert arrived[name].dtype == tensor.dtype
        assert arrived[name].shape == tensor.shape
        assert torch.equal(arrived[name].view(-1), tensor.reshape(-1))
        assert arrived[name].data_ptr() != tensor.data_ptr() or not tensor.nbytes


def test_copies_are_ahead_of_their_use_by_a_bounded_number_of_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_copies, "AHEAD_BYTES", 80)
    read = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(8):
            read.append(index)
            yield str(index), torch.full((5,), index)  # 40 bytes

    for number, (name, tensor) in enumerate(on_device(tensors(), CPU)):
        assert torch.equal(tensor, torch.full((5,), number)), name
        assert len(read) <= number + 3


def test_a_tensor_for_which_the_device_has_no_room_comes_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = {"small": torch.ones(2), "large": torch.ones(500)}
    empty = torch.empty

    def limited(shape: torch.Size, **options: object) -> torch.Tensor:
        if shape == (500,):
            raise torch.OutOfMemoryError("no room")
        return empty(shape, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", limited)
    arrived = dict(on_device(tensors.items(), CPU))
    assert arrived["large"] is tensors["large"]
    assert arrived["small"] is not tensors["small"]


def test_an_error_where_tensors_are_used_ends_the_threads() -> None:
    stream = on_device(every_type().items(), CPU)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    with pytest.raises(StopIteration):
        next(stream)


def test_a_copy_ends_with_its_last_piece() -> None:
    source, target = torch.arange(100), torch.zeros(100, dtype=torch.int64)
    with DeviceCopier(CPU) as copier:
        wait(copier.begin(source, target))
        assert torch.equal(source, target)
