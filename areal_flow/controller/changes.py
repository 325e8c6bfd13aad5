"""Wakes those who wait for a change, and ends their wait when something broke."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from areal_flow.errors import ArealFlowError

logger = logging.getLogger(__name__)


class Changes:
    """A counter of changes that coroutines wait for, and what runs beside them."""

    def __init__(self) -> None:
        self.num_changes = 0
        self._next_change = asyncio.Event()
        self._fatal: ArealFlowError | None = None

    def notify(self) -> None:
        self.num_changes += 1
        self._next_change.set()
        self._next_change = asyncio.Event()

    async def wait_for_change(self, seen: int) -> None:
        """Return once `num_changes` exceeds `seen`; raise what ended the run, if something did.

        Whoever reads `num_changes` and then looks at the state misses no change in between.
        """
        while self.num_changes <= seen:
            await self._next_change.wait()
        if self._fatal:
            raise self._fatal

    def _start(
        self, work: Coroutine[None, None, None], among: set[asyncio.Task[None]], if_it_fails: str
    ) -> None:
        """Begin what runs beside the stages; an error of it that nobody expected ends the run."""

        def ended(task: asyncio.Task[None]) -> None:
            among.discard(task)
            self.notify()
            if not task.cancelled() and (error := task.exception()):
                logger.error("%s", if_it_fails, exc_info=error)
                self._fatal = ArealFlowError(f"{if_it_fails}: {error!r}")

        task = asyncio.create_task(work)
        among.add(task)
        task.add_done_callback(ended)
