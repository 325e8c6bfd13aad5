"""The identity of weights and of optimizers: one hash of named tensors, or of a file of them.

xxh3 finds every accident and no attack; it is as quick as memory (`benchmarks/hashing.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names, types, shapes and bytes, independent of the mapping's order.

    32 hexadecimal digits. Other threads run meanwhile.
    """
    return _hash((name, tensors[name]) for name in sorted(tensors))


def hash_file(path: Path, *, without: Collection[str] = ()) -> str:
    """Return `hash_tensors` of a safetensors file, of which one tensor at a time is in memory.

    Args:
        without: names that do not count.

    Raises:
        OSError, SafetensorError: the file cannot be read.
    """
    with safe_open(path, framework="pt") as file:
        return _hash((name, file.get_tensor(name)) for name in sorted({*file.keys()} - {*without}))


def _hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = xxhash.xxh3_128()
    for name, stored in tensors:
        tensor = stored.detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
