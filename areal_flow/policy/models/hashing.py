"""The identity of weights and of optimizers: one hash of named tensors, or of a file of them.

xxh3 finds accidents, not attacks (`docs/decisions/0006-protocols-and-registries.md`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

HANDED_OVER_BYTES = 1 << 20
"""Less is hashed by the time that another thread has begun."""


class TensorHash:
    """`hash_tensors` of tensors that come one after the other, in the order of their names."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a contiguous tensor in main memory. Other threads run meanwhile."""
        self._digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        self._digest.update(tensor.flatten().view(torch.uint8).numpy().data)

    def hash_async(
        self, tensors: Iterable[tuple[str, Tensor]], *, thread: Executor
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors, each of which a thread adds while the caller uses it.

        Small ones are added before they are yielded, which is sooner done than handed over.
        """
        before = None
        for name, tensor in tensors:
            if before is not None:
                before.result()
            if tensor.nbytes < HANDED_OVER_BYTES:
                self.add(name, tensor)
            else:
                before = thread.submit(self.add, name, tensor)
            yield name, tensor
        if before is not None:
            before.result()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return 32 hexadecimal digits: of names, types, shapes and bytes, in the order of names."""
    return _hash(in_main_memory(tensors))


def hash_files(*paths: Path, without: Collection[str] = ()) -> str:
    """Return `hash_tensors` of safetensors files, of which one tensor at a time is in memory."""
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(path, framework="pt")) for path in paths]
        holders = {name: file for file in files for name in {*file.keys()} - {*without}}
        return _hash((name, holders[name].get_tensor(name)) for name in sorted(holders))


def _hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    content = TensorHash()
    for name, tensor in tensors:
        content.add(name, tensor)
    return content.hexdigest()


def in_main_memory(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor, contiguous and in main memory, in the order of names.

    Each is read when the one before it is yielded: from then on it is on its way from its GPU.
    """
    arrivals: deque[Callable[[], tuple[str, Tensor]]] = deque()
    for name in sorted(tensors):
        arrivals.append(_begin_copy(name, tensors[name].detach()))
        if len(arrivals) > 1:
            yield arrivals.popleft()()
    for last in arrivals:
        yield last()


def _begin_copy(name: str, tensor: Tensor) -> Callable[[], tuple[str, Tensor]]:
    """Return what waits until a tensor is in main memory.

    From a GPU it goes into pinned memory on a stream of its own, beside what comes after that.
    """
    if not tensor.is_cuda:
        there = tensor.cpu().contiguous()
        return lambda: (name, there)
    stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        arrived = stream.record_event()
    tensor.record_stream(stream)  # nobody may get its memory before it is copied

    def arrival() -> tuple[str, Tensor]:
        arrived.synchronize()
        return name, copy

    return arrival
