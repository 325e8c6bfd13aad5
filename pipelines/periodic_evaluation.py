"""Evaluations beside training: which one is due, and one at a time.

An evaluation is named by the step at which it is due, so that it is made once, whatever dies: a
driver that resumes makes the newest one that is due and has no rows. It refuses to know how
prompts are answered.

| who           | waits for                  | unblocked by                                 |
|---------------|----------------------------|----------------------------------------------|
| training      | nothing                    |                                              |
| an evaluation | the one before it          | its end; a newer one replaces one that waits |
| the run's end | the one that is being made | its end; a stop cancels it                   |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from areal_flow.errors import ArealFlowError

logger = logging.getLogger(__name__)


class PeriodicEvaluations:
    """Starts evaluations while training goes on. One event loop."""

    def __init__(
        self,
        evaluate: Callable[[str], Awaitable[None]],
        *,
        every_steps: int,
        num_steps: int,
        made: Iterable[str] = (),
    ) -> None:
        """Take what makes the evaluation of a name.

        Args:
            every_steps: 0 for none.
            num_steps: of the run; its last version is evaluated after training.
            made: names of evaluations that are there already.
        """
        self._evaluate = evaluate
        self._every_steps, self._num_steps = every_steps, num_steps
        self._begun = set(made)
        self._waiting = ""
        self._making: asyncio.Task[None] | None = None

    def reached(self, step: int) -> None:
        """Start the newest evaluation that is due at this step, unless it was made."""
        if not self._every_steps:
            return
        due = step - step % self._every_steps
        name = evaluation_name(due)
        if not 0 < due < self._num_steps or name in self._begun:
            return
        self._begun.add(name)
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._make(name))
            return
        if self._waiting:
            logger.warning("evaluation %s is left out: they last too long", self._waiting)
        self._waiting = name

    async def settle(self) -> None:
        """Wait for the evaluation that is being made; one that waits for it is left out."""
        self._waiting = ""
        if self._making is not None:
            await self._making

    async def cancel(self) -> None:
        """End the evaluation that is being made; who resumes makes it if it is still the newest."""
        if self._making is not None:
            self._making.cancel()
            await asyncio.gather(self._making, return_exceptions=True)

    async def _make(self, name: str) -> None:
        while name:
            try:
                await self._evaluate(name)
            except ArealFlowError as error:  # training finds out by itself whether it must end
                logger.warning("evaluation %s could not be made: %s", name, error)
            name, self._waiting = self._waiting, ""


def evaluation_name(step: int) -> str:
    """Return the name of the evaluation that is due at a step; names sort by step."""
    return f"step-{step:08d}"
