"""The identity of weights and optimizers: one hash of named tensors, or of files of them.

xxh3 detects accidents, not attacks (`docs/decisions/0006-protocols-and-registries.md`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

MIN_ASYNC_BYTES = 1 << 20
"""Smaller tensors are hashed inline, before another thread would have started."""

PIECE_BYTES = 1 << 24
"""Of a tensor on a GPU, copied to pinned memory at once to be hashed."""

MAX_PENDING = 8
"""Pieces that wait to be hashed: so many are in pinned memory, and one more that is copied."""


class TensorHash:
    """Computes `hash_tensors` of tensors that come one at a time, in the order of their names."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._pending = deque[Future[None]]()

    def add(self, name: str, tensor: Tensor) -> None:
        """Hash a contiguous tensor in main memory, without the GIL."""
        self._digest.update(_header(name, tensor))
        self._add_bytes(tensor)

    def add_async(self, name: str, tensor: Tensor, *, thread: Executor) -> None:
        """Hash a tensor in a thread; return before that, or before it has left its GPU.

        Call `finish` before the tensor changes.
        """
        if _is_on_gpu(tensor):
            self._submit(thread, partial(self._digest.update, _header(name, tensor)))
            for piece in torch.split(tensor.flatten(), PIECE_BYTES // tensor.element_size()):
                self._submit(thread, partial(self._add_copy, _begin_copy(name, piece)))
        elif tensor.nbytes < MIN_ASYNC_BYTES:
            self.finish()
            self.add(name, tensor.contiguous())
        else:
            self._submit(thread, partial(self.add, name, tensor.contiguous()), max_pending=0)

    def finish(self) -> None:
        """Wait until all tensors are hashed; raise what hashing raised."""
        while self._pending:
            self._pending.popleft().result()

    def _submit(
        self, thread: Executor, work: Callable[[], None], max_pending: int = MAX_PENDING
    ) -> None:
        while len(self._pending) > max_pending:
            self._pending.popleft().result()
        self._pending.append(thread.submit(work))

    def _add_bytes(self, tensor: Tensor) -> None:
        self._digest.update(tensor.flatten().view(torch.uint8).numpy().data)

    def _add_copy(self, finish: Callable[[], tuple[str, Tensor]]) -> None:
        self._add_bytes(finish()[1])

    def hash_async(
        self, tensors: Iterable[tuple[str, Tensor]], *, thread: Executor
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors, and hash large ones in a thread while the caller uses them."""
        for name, tensor in tensors:
            self.add_async(name, tensor, thread=thread)
            yield name, tensor
        self.finish()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _header(name: str, tensor: Tensor) -> bytes:
    return f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode()


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return 32 hexadecimal digits of names, types, shapes and bytes, in the order of names."""
    return _hash(in_main_memory(tensors))


def hash_files(*paths: Path, without: Collection[str] = ()) -> str:
    """Return `hash_tensors` of safetensors files, with one tensor at a time in memory."""
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        by_name = {name: file for file in files for name in {*file.keys()} - {*without}}
        return _hash((name, by_name[name].get_tensor(name)) for name in sorted(by_name))


def _hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    content = TensorHash()
    for name, tensor in tensors:
        content.add(name, tensor)
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


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _begin_copy(name: str, tensor: Tensor) -> Callable[[], tuple[str, Tensor]]:
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
