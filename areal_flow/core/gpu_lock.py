"""The lock of the one GPU of a run whose trainer and generators take turns.

The driver holds it for the trainer's turn, so that its death ends the turn. Generators hold it
together, each while it takes memory of the GPU: a new one waits although nobody has told it to.
"""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ALONE, TOGETHER = fcntl.LOCK_EX, fcntl.LOCK_SH
POLL_S = 0.05


@asynccontextmanager
async def gpu_lock(processes: Path, kind: int) -> AsyncIterator[None]:
    """Hold the lock that stands in the folder of a driver's processes."""
    with (processes / "gpu").open("a+") as file:
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(POLL_S)
        yield
