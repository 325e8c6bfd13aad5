"""Evaluations beside training: which one is due, and one at a time.

An evaluation is named by the step at which it is due, so that it is made once, whatever dies: a
driver that resumes makes the newest one that is due and has no rows. This module refuses to know
how prompts are answered.

| who           | waits for                  | unblocked by                                 |
|---------------|----------------------------|----------------------------------------------|
| training      | nothing                    |                                              |
| an evaluation | the one before it          | its end; a newer one replaces one that waits |
| the run's end | the one that is being made | its end; a stop cancels it                   |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from areal_flow.config import Recipe
from areal_flow.errors import ArealFlowError
from areal_flow.evaluation.pass_rates import has_plateaued, tabulate
from areal_flow.evaluation.scores import EvaluationTable
from areal_flow.run.layout import RunLayout
from areal_flow.store.committed import evaluation_names, read_evaluation

logger = logging.getLogger(__name__)

_PREFIX = "step-"


class PeriodicEvaluations:
    """Starts evaluations while training goes on. One event loop."""

    def __init__(
        self,
        evaluate: Callable[[str], Awaitable[None]],
        recipe: Recipe,
        *,
        made: Iterable[str] = (),
    ) -> None:
        """Take what makes the evaluation of a name, and the names of those that are there."""
        self._evaluate = evaluate
        self._every_steps = recipe.evaluation.every_steps if recipe.has_held_out else 0
        self._num_steps = recipe.num_steps
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
    return f"{_PREFIX}{step:08d}"


def read_periodic(
    layout: RunLayout, *, threshold: float, verifier: str
) -> dict[str, EvaluationTable]:
    """Return the evaluations that were made beside training, by name, in order.

    Args:
        verifier: the one that counts now; what another one scored is not compared with it.
    """
    names = evaluation_names(layout.evaluations, layout.writers)
    answers = {
        name: read_evaluation(layout.evaluations, layout.writers, name)
        for name in names
        if name.startswith(_PREFIX)
    }
    return {
        name: tabulate(rows, threshold=threshold)
        for name, rows in answers.items()
        if {row["verifier"] for row in rows} == {verifier}
    }


def is_flat(held_out: Mapping[str, EvaluationTable], *, patience: int) -> bool:
    """Return whether the pass rate, before training and beside it, has plateaued."""
    names = ["before", *sorted(name for name in held_out if name.startswith(_PREFIX))]
    rates = [held_out[name].overall.passed.pass_rate for name in names if name in held_out]
    return has_plateaued(rates, patience=patience)
