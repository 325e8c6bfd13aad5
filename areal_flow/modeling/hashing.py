"""Named tensors in, one hash out: the identity of weights and of optimizer states."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names, types, shapes and bytes, independent of the mapping's order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
