"""The identity of weights and of optimizers: one hash of named tensors, or of a file of them.

xxh3 finds every accident and no attack; it is as quick as memory (`benchmarks/hashing.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names, types, shapes and bytes, independent of the mapping's order.

    32 hexadecimal digits. Other threads run meanwhile.
    """
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_file(path: Path, *, without: Collection[str] = ()) -> str:
    """Return `hash_tensors` of a safetensors file, of which one tensor at a time is in memory.

    Args:
        without: names that do not count.

    Raises:
        OSError, SafetensorError: the file cannot be read.
    """
    with safe_open(path, framework="pt") as file:
        return hash_tensors(_StoredTensors(file, without))


class _StoredTensors(Mapping[str, Tensor]):
    def __init__(self, file: Any, without: Collection[str]) -> None:
        self._file = file
        self._names = sorted(set(file.keys()) - set(without))

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
