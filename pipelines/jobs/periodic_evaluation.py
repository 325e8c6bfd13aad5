"""Evaluations on held-out prompts: before training, during it one at a time, and after it.

An evaluation during training is named by the step at which it is due, so that it runs once even if
a driver dies: the next driver runs the newest one that is due and has no rows. Training waits for
none. One that is due while another runs waits for it, and is replaced by a newer one. The end of
training waits for the one that runs; a stop cancels it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from areal_flow.config import Recipe
from areal_flow.core.errors import ArealFlowError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.core.pass_rates import EvaluationTable, has_plateaued, tabulate
from areal_flow.flow.answers import Answer, answer_held_out
from areal_flow.flow.flow import Flow
from areal_flow.log.run_log import append_evaluation, evaluation_names, read_evaluation
from areal_flow.policy.tokenizer.directory import texts_of, tokenizer_of
from areal_flow.rollout.prompts.table import PromptTable
from areal_flow.tracking.registry import RunTracking
from pipelines.console.progress import Progress, counted
from pipelines.console.tables import with_interval

logger = logging.getLogger(__name__)

_PREFIX = "step-"


class PeriodicEvaluations:
    """Starts evaluations during training, on one event loop."""

    def __init__(
        self, evaluate: Callable[[str], Awaitable[None]], recipe: Recipe, made: Iterable[str] = ()
    ) -> None:
        self._evaluate = evaluate
        self._every_steps = recipe.evaluation.every_steps if recipe.has_held_out else 0
        self._num_steps = recipe.num_steps
        self._begun = set(made)
        self._waiting = ""
        self._running: asyncio.Task[None] | None = None

    def reached(self, step: int) -> None:
        """Start the newest evaluation that is due at this step, unless it was started before."""
        if not self._every_steps:
            return
        due = step - step % self._every_steps
        name = evaluation_name(due)
        if not 0 < due < self._num_steps or name in self._begun:
            return
        self._begun.add(name)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(name))
            return
        if self._waiting:
            logger.warning("evaluation %s is left out: they last too long", self._waiting)
        self._waiting = name

    async def settle(self) -> None:
        """Wait for the running evaluation; one that waits for it is left out."""
        self._waiting = ""
        if self._running is not None:
            await self._running

    async def cancel(self) -> None:
        """Cancel the running evaluation; a resumed run repeats it if it is the newest."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self, name: str) -> None:
        while name:
            try:
                await self._evaluate(name)
            except ArealFlowError as error:  # training itself notices whether it must end
                logger.warning("evaluation %s could not be made: %s", name, error)
            name, self._waiting = self._waiting, ""


def evaluation_name(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


def read_periodic(
    layout: RunLayout, *, threshold: float, verifier: str
) -> dict[str, EvaluationTable]:
    """Return earlier evaluations during training by name, in order, of the same verifier."""
    names = evaluation_names(layout)
    answers = {name: read_evaluation(layout, name) for name in names if name.startswith(_PREFIX)}
    return {
        name: tabulate(rows, threshold=threshold)
        for name, rows in answers.items()
        if {row["verifier"] for row in rows} == {verifier}
    }


def is_flat(held_out: Mapping[str, EvaluationTable], *, patience: int) -> bool:
    names = ["before", *sorted(name for name in held_out if name.startswith(_PREFIX))]
    rates = [held_out[name].overall.passed.pass_rate for name in names if name in held_out]
    return has_plateaued(rates, patience=patience)


@dataclass
class HeldOutEvaluations:
    """Answers a run's held-out prompts before, during and after training."""

    layout: RunLayout
    recipe: Recipe
    writer: Writer
    verifier: str
    answer: Answer
    progress: Progress
    tracking: RunTracking
    tables: dict[str, EvaluationTable] = field(default_factory=dict)
    """By evaluation."""

    async def evaluate(self, name: str, version: int) -> None:
        if not self.recipe.has_held_out:
            return
        if rows := self.answered(name, version):
            if {row["verifier"] for row in rows} == {self.verifier}:
                self.tables[name] = tabulate(rows, threshold=self.recipe.pass_threshold)
            return
        total = len(PromptTable(self.layout.held_out_prompts, seed=self.recipe.seed))
        self.progress.phase(f"Evaluating version {version} on {total} held-out prompts")
        await self._append(name, counted(self.answer, self.progress, total=total))

    async def _append(self, name: str, answer: Answer) -> None:
        table = PromptTable(self.layout.held_out_prompts, seed=self.recipe.seed)
        tokenizer = await asyncio.to_thread(tokenizer_of, self.layout.model)
        rows = await answer_held_out(
            answer,
            await asyncio.to_thread(table.rows),
            settings=self.recipe.evaluation,
            name=name,
            seed=self.recipe.seed,
            writer_epoch=self.writer.writer_epoch,
            decode=partial(texts_of, tokenizer),
        )
        await asyncio.to_thread(append_evaluation, self.layout, rows, self.writer)
        self.tracking.wake()
        threshold = self.recipe.pass_threshold
        self.tables[name] = await asyncio.to_thread(tabulate, rows, threshold=threshold)

    def answered(self, name: str, version: int) -> list[dict[str, Any]]:
        rows = read_evaluation(self.layout, name)
        return [row for row in rows if row["policy_version"] == version]

    def beside_training(self, flow: Flow) -> PeriodicEvaluations:
        layout, threshold = self.layout, self.recipe.pass_threshold
        self.tables |= read_periodic(layout, threshold=threshold, verifier=self.verifier)

        async def evaluate(name: str) -> None:
            await self._append(name, self.answer)
            scores = self.tables[name].overall
            rate, reward = (with_interval(scores, what) for what in ("pass_rate", "reward_mean"))
            self.progress.phase(f"evaluation {name}: pass rate {rate}, mean reward {reward}")
            self.stop_on_plateau(flow)

        made = evaluation_names(layout)
        return PeriodicEvaluations(evaluate, self.recipe, made=made)

    def stop_on_plateau(self, flow: Flow) -> None:
        patience = self.recipe.evaluation.early_stopping_patience
        if is_flat(self.tables, patience=patience) and not flow.stop_requested:
            self.progress.phase(f"No better pass rate in {patience} evaluations: training ends")
            flow.request_stop()
