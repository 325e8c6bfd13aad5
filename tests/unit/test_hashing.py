"""The hash of named tensors: its value is stored in every run, so it must never change."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from areal_flow.policy.models.hashing import (
    MAX_RAW_BYTES,
    PIECE_BYTES,
    TensorHash,
    hash_files,
    hash_tensors,
    in_main_memory,
)

TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3).mT,
    "a": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 4),
}


def test_hash_of_named_tensors_never_changes() -> None:
    assert hash_tensors(TENSORS) == "3b90ba18b1e8d9478ea9f77b88ec1c7d"
    assert hash_tensors(dict(reversed(TENSORS.items()))) == hash_tensors(TENSORS)
    assert hash_tensors({}) == "99aa06d3014798d86001c324468d497f"


def test_hash_of_large_tensors_is_made_of_those_of_their_pieces() -> None:
    large = torch.arange(PIECE_BYTES // 2 + 3, dtype=torch.int16)
    content = f"large:torch.int16:({len(large)},)".encode()
    data = large.numpy().tobytes()
    for piece in (data[:PIECE_BYTES], data[PIECE_BYTES:]):
        content += xxhash.xxh3_128(piece).digest()
    assert hash_tensors({"large": large}) == xxhash.xxh3_128(content).hexdigest()


class LazyFuture(Future[None]):
    """Work given to `LastMoment`, done when its result is awaited."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work = work

    def result(self, timeout: float | None = None) -> None:
        if not self.done():
            self.set_result(self._work())
        return super().result(timeout)


class LastMoment(Executor):
    """A thread that finishes at the last possible moment."""

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        return LazyFuture(partial(work, *given, **named))


@pytest.mark.parametrize("threads", [LastMoment, partial(ThreadPoolExecutor, 1)])
def test_hash_beside_other_work_is_that_of_the_same_tensors(
    threads: Callable[[], Executor],
) -> None:
    tensors = {f"{n}": torch.rand(MAX_RAW_BYTES // 4 + n % 3 - 1) for n in range(9)}
    content = TensorHash()
    with threads() as executor:
        passed = dict(content.hash_async(in_main_memory(tensors), threads=executor))
    assert hash_tensors(passed) == hash_tensors(tensors)
    assert content.hexdigest() == hash_tensors(tensors)


def test_names_shapes_types_and_bytes_count() -> None:
    tensor = TENSORS["b"]
    hashes = {
        hash_tensors(tensors)
        for tensors in (
            {"b": tensor},
            {"c": tensor},
            {"b": tensor.flatten()},
            {"b": tensor.contiguous().view(torch.int32)},
            {"b": tensor + 1e-7},
        )
    }
    assert len(hashes) == 5


def test_file_has_the_hash_of_its_tensors(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, file)
    assert hash_files(file) == hash_tensors(TENSORS)
    others = {name: tensor for name, tensor in TENSORS.items() if name != "a"}
    assert hash_files(file, without=["a", "unknown"]) == hash_tensors(others)
