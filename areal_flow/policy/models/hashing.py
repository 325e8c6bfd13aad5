"""The identity of weights and optimizers: one hash of named tensors, or of files of them.

xxh3 detects accidents, not attacks (`docs/decisions/0006-protocols-and-registries.md`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from areal_flow.core.machine import copying_threads

MAX_RAW_BYTES = 1 << 20
"""Larger tensors are hashed by the hashes of their pieces, which several threads compute."""

PIECE_BYTES = 1 << 24

PIECES_PER_THREAD = 2
"""Pieces that are in memory to be hashed; from a GPU each is a copy in pinned memory."""

FinishCopy = Callable[[], tuple[str, Tensor]]
"""Waits for a tensor's copy in main memory, and returns it with its name."""


class TensorHash:
    """Computes `hash_tensors` of tensors that come one at a time, in the order of their names."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._max_pending = PIECES_PER_THREAD * copying_threads()
        self._pending = deque[Callable[[], Any]]()
        """Return what is hashed next, in order."""

    def add_async(self, name: str, tensor: Tensor, *, threads: Executor) -> None:
        """Hash a tensor in threads; return before that, or before it has left its GPU.

        Call `finish` before the tensor changes.
        """
        header = f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode()
        self._pending.append(lambda: header)
        if tensor.nbytes <= MAX_RAW_BYTES:
            self._append(partial(_content, _begin_copy(name, tensor)))
            return
        for piece in torch.split(tensor.flatten(), PIECE_BYTES // tensor.element_size()):
            self._append(threads.submit(_digest, _begin_copy(name, piece)).result)

    def finish(self, max_pending: int = 0) -> None:
        """Wait until all tensors are hashed; raise what hashing raised."""
        while len(self._pending) > max_pending:
            self._digest.update(self._pending.popleft()())

    def _append(self, content: Callable[[], Any]) -> None:
        self.finish(self._max_pending - 1)
        self._pending.append(content)

    def hash_async(
        self, tensors: Iterable[tuple[str, Tensor]], *, threads: Executor
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors, and hash them in threads while the caller uses them."""
        for name, tensor in tensors:
            self.add_async(name, tensor, threads=threads)
            yield name, tensor
        self.finish()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _content(finish_copy: FinishCopy) -> Any:
    return finish_copy()[1].flatten().view(torch.uint8).numpy().data


def _digest(finish_copy: FinishCopy) -> bytes:
    return xxhash.xxh3_128(_content(finish_copy)).digest()


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return 32 hexadecimal digits of names, types, shapes and bytes, in the order of names.

    Bytes of a tensor above 1 MiB are represented by a hash of each 16 MiB.
    """
    return _hash((name, tensors[name].detach()) for name in sorted(tensors))


def hashing_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(copying_threads())


def hash_files(*paths: Path, without: Collection[str] = ()) -> str:
    """Return `hash_tensors` of safetensors files, with a few tensors at a time in memory."""
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        by_name = {name: file for file in files for name in {*file.keys()} - {*without}}
        return _hash((name, by_name[name].get_tensor(name)) for name in sorted(by_name))


def _hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    content = TensorHash()
    with hashing_threads() as threads:
        for name, tensor in tensors:
            content.add_async(name, tensor, threads=threads)
        content.finish()
    return content.hexdigest()


def in_main_memory(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor, contiguous and in main memory, in the order of names.

    Each one's copy from a GPU begins before the one before it is yielded.
    """
    finish_last = None
    for name in sorted(tensors):
        finish = _begin_copy(name, tensors[name].detach())
        if finish_last is not None:
            yield finish_last()
        finish_last = finish
    if finish_last is not None:
        yield finish_last()


def _begin_copy(name: str, tensor: Tensor) -> FinishCopy:
    """Start a tensor's copy to main memory; return a function that waits for it.

    From a GPU it goes to pinned memory on its own stream, beside later work.
    """
    if not tensor.is_cuda:
        copied = tensor.cpu().contiguous()
        return lambda: (name, copied)
    stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        arrived = stream.record_event()
    tensor.record_stream(stream)  # its memory must not be reused before it is copied

    def finish() -> tuple[str, Tensor]:
        arrived.synchronize()
        return name, copy

    return finish
