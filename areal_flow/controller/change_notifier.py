"""Wakes every waiter that has not seen the latest change. For one event loop."""

from __future__ import annotations

import asyncio


class ChangeNotifier:
    """Read `count`, look at the state, `wait_beyond(count)`: no change in between is missed."""

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Something changed."""
        self.count += 1
        self._next.set()
        self._next = asyncio.Event()

    async def wait_beyond(self, seen: int) -> None:
        """Return once more than `seen` changes have happened."""
        while self.count <= seen:
            await self._next.wait()
