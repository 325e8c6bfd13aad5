"""The one way of arrays from main memory to a device, for which nobody waits, and the way back.

To CUDA they go from pinned memory, on a stream beside the one that computes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[Any], device: torch.device | str) -> Tensor:
    """Return values as a tensor; on a CPU it shares their memory."""
    tensor, device = torch.from_numpy(values), torch.device(device)
    if device.type != "cuda":
        return tensor.to(device)
    beside, computing = _stream_of_copies(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(beside):
        moved = tensor.pin_memory().to(device, non_blocking=True)
    computing.wait_stream(beside)
    moved.record_stream(computing)  # or a later copy would get its memory while it is in use
    return moved


def to_host(values: Tensor) -> Tensor:
    """Return a device's numbers in main memory, as float64; this waits for the device."""
    return values.double().cpu()


@lru_cache
def _stream_of_copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
