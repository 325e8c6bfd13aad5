"""What the hashes of a training step cost: bytes a second on one core, seconds a step.

    python benchmarks/hashing.py

Measured on 200 MB in memory, the best of three; the seconds a step are extrapolated to a model of
1.5 billion parameters.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import torch
import xxhash

NUM_BYTES = 200_000_000
NUM_PARAMETERS = 1.5e9
MASTER_BYTES, SERVED_BYTES, OPTIMIZER_BYTES = 4, 2, 8
"""A parameter: float32, bfloat16, and AdamW's two float32 moments."""


def bytes_per_second(new: Callable[[memoryview], object], data: memoryview) -> float:
    """Return how quickly a hash goes over the data."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        new(data)
        seconds.append(time.perf_counter() - began)
    return NUM_BYTES / min(seconds)


def main() -> None:
    data = torch.randint(0, 255, (NUM_BYTES,), dtype=torch.uint8).numpy().data
    sha256 = bytes_per_second(hashlib.sha256, data)
    xxh3 = bytes_per_second(xxhash.xxh3_128, data)
    before = NUM_PARAMETERS * (MASTER_BYTES + OPTIMIZER_BYTES + SERVED_BYTES) / sha256
    now = NUM_PARAMETERS * (MASTER_BYTES + SERVED_BYTES) / xxh3
    print(f"SHA-256 {sha256 / 1e9:.2f} GB/s, xxh3 {xxh3 / 1e9:.2f} GB/s, on one core")
    print(f"1.5 billion parameters, extrapolated from {NUM_BYTES / 1e6:.0f} MB, seconds a step:")
    print(f"  {before:.1f} for master, optimizer and served weights by SHA-256")
    print(f"  {now:.1f} for master and served weights by xxh3, beside the writing of the file")


if __name__ == "__main__":
    main()
