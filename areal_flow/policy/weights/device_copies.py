"""Copies between a GPU and main memory, by threads with a bounded pinned buffer each.

A GPU copies pinned memory alone at the speed of its link. Pinning memory takes longer than copying
it, so pieces go through buffers that are used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import local
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

PIECE_BYTES = 1 << 24
"""Of a thread's pinned buffer."""

NUM_THREADS = 4
"""One copies within main memory at 5 to 10 GB/s, a GPU's link at 25 to 50."""

AHEAD_BYTES = 1 << 28
"""Of tensors that are on the GPU before they are used, beside the one that is."""


class DeviceCopier:
    """Copies to or from one device; to the caller of its methods, as part of the current stream."""

    def __init__(self, device: torch.device, num_threads: int = NUM_THREADS) -> None:
        if device.type == "cuda" and device.index is None:  # a thread's own may be another one
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._threads = ThreadPoolExecutor(num_threads)
        self._of_thread = local()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._threads.shutdown(cancel_futures=error is not None)

    def close(self) -> None:
        """End the threads after the copies that have begun, without waiting for them."""
        self._threads.shutdown(wait=False)

    def begin(self, source: Tensor, target: Tensor) -> list[Future[None]]:
        """Start to copy a tensor after the work that its device has; return what ends with it.

        Neither may change, nor be freed, until then.
        """
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.current_stream(self._device).record_event()
        sources, targets = (torch.split(_bytes_of(each), PIECE_BYTES) for each in (source, target))
        return [
            self._threads.submit(self._copy, *piece, ready)
            for piece in zip(sources, targets, strict=True)
        ]

    @torch.inference_mode()  # where it began in this mode, targets can change in it alone
    def _copy(self, source: Tensor, target: Tensor, ready: torch.cuda.Event | None) -> None:
        if ready is None:
            target.copy_(source)
            return
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream = self._of_thread.stream
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            if not hasattr(self._of_thread, "buffer"):
                buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
                self._of_thread.buffer = buffer
            buffer = self._of_thread.buffer[: len(source)]
            if source.is_cuda:
                buffer.copy_(source, non_blocking=True)
                stream.synchronize()
                target.copy_(buffer)
            else:
                buffer.copy_(source)
                target.copy_(buffer, non_blocking=True)
                stream.synchronize()


def on_device(
    tensors: Iterable[tuple[str, Tensor]], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in main memory as tensors of a device, in order, while later ones are copied.

    One for which the device has no room is yielded as it is.
    """
    ahead = deque[tuple[str, Tensor, list[Future[None]]]]()
    num_bytes = 0
    with DeviceCopier(device) as copier:
        for name, tensor in tensors:
            while ahead and num_bytes + tensor.nbytes > AHEAD_BYTES:
                num_bytes -= ahead[0][1].nbytes
                yield _first_arrived(ahead)
            try:
                target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            except torch.OutOfMemoryError:
                ahead.append((name, tensor, []))
            else:
                ahead.append((name, target, copier.begin(tensor, target)))
                del target  # for what reads it to free it
            num_bytes += tensor.nbytes
        while ahead:
            yield _first_arrived(ahead)


def _first_arrived(ahead: deque[tuple[str, Tensor, list[Future[None]]]]) -> tuple[str, Tensor]:
    name, tensor, copies = ahead.popleft()
    for copy in copies:
        copy.result()
    return name, tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
