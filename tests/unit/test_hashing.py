"""The hash of named tensors: its value is stored in every run, so it must never change."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from areal_flow.models.hashing import hash_files, hash_tensors

TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3).mT,
    "a": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 4),
}


def test_hash_of_named_tensors_is_what_it_was() -> None:
    assert hash_tensors(TENSORS) == "3b90ba18b1e8d9478ea9f77b88ec1c7d"
    assert hash_tensors(dict(reversed(TENSORS.items()))) == hash_tensors(TENSORS)
    assert hash_tensors({}) == "99aa06d3014798d86001c324468d497f"


def test_names_shapes_types_and_bytes_count() -> None:
    tensor = TENSORS["b"]
    found = {
        hash_tensors(tensors)
        for tensors in (
            {"b": tensor},
            {"c": tensor},
            {"b": tensor.flatten()},
            {"b": tensor.contiguous().view(torch.int32)},
            {"b": tensor + 1e-7},
        )
    }
    assert len(found) == 5


def test_file_has_the_hash_of_its_tensors(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, file)
    assert hash_files(file) == hash_tensors(TENSORS)
    others = {name: tensor for name, tensor in TENSORS.items() if name != "a"}
    assert hash_files(file, without=["a", "unknown"]) == hash_tensors(others)
