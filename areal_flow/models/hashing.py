"""The identity of weights and of optimizers: one hash of named tensors, or of a file of them.

xxh3 finds every accident and no attack; it is as quick as memory (`benchmarks/hashing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain, pairwise
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names, types, shapes and bytes, independent of the mapping's order.

    32 hexadecimal digits. Other threads run meanwhile, and so does a GPU that the tensors are on.
    """
    return _hash(_in_main_memory((name, tensors[name]) for name in sorted(tensors)))


def hash_files(*paths: Path, without: Collection[str] = ()) -> str:
    """Return `hash_tensors` of safetensors files, of which one tensor at a time is in memory.

    Args:
        without: names that do not count.

    Raises:
        OSError, SafetensorError: a file cannot be read.
    """
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(path, framework="pt")) for path in paths]
        holders = {name: file for file in files for name in {*file.keys()} - {*without}}
        return _hash((name, holders[name].get_tensor(name)) for name in sorted(holders))


def _hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _in_main_memory(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in main memory; the next one is on its way from its GPU meanwhile."""
    nothing: tuple[str, Tensor, Callable[[], None]] = ("", torch.empty(0), lambda: None)
    copies = ((name, *_begin_copy(tensor.detach())) for name, tensor in tensors)
    for (name, copy, wait), _ in pairwise(chain(copies, [nothing])):
        wait()
        yield name, copy


def _begin_copy(tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Return where a tensor will be in main memory, and what waits until it is there.

    From a GPU it goes into pinned memory on a stream of its own, behind what computes the tensor
    and beside what comes after that.
    """
    if not tensor.is_cuda:
        return tensor.cpu().contiguous(), lambda: None
    stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.default_stream(tensor.device))
    with torch.cuda.stream(stream):
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        arrived = stream.record_event()
    return copy, arrived.synchronize
