"""Wakes coroutines that wait for a change, or raises the error that ended the run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from areal_flow.core.errors import ArealFlowError

logger = logging.getLogger(__name__)


class Changes:
    """A counter of changes that coroutines wait for, and the tasks beside them."""

    def __init__(self) -> None:
        self.num_changes = 0
        self._next_change = asyncio.Event()
        self._fatal: ArealFlowError | None = None

    def notify(self) -> None:
        self.num_changes += 1
        self._next_change.set()
        self._next_change = asyncio.Event()

    async def wait_for_change(self, seen: int) -> None:
        """Return once `num_changes` exceeds `seen`; raise the error that ended the run.

        A caller reads `num_changes` before the state, so that it misses no change in between.
        """
        while self.num_changes <= seen:
            await self._next_change.wait()
        if self._fatal:
            raise self._fatal

    def _start(
        self, work: Coroutine[None, None, None], among: set[asyncio.Task[None]], if_it_fails: str
    ) -> None:
        """Start a task beside the stages; an unexpected error in it ends the run."""

        def ended(task: asyncio.Task[None]) -> None:
            among.discard(task)
            self.notify()
            if not task.cancelled() and (error := task.exception()):
                logger.error("%s", if_it_fails, exc_info=error)
                self._fatal = ArealFlowError(f"{if_it_fails}: {error!r}")

        task = asyncio.create_task(work)
        among.add(task)
        task.add_done_callback(ended)
