"""The ledger's rows in, a trainer that goes through them again out; nothing is written.

The trainer is the run's own, but for its channel, which only hashes what would be served.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from areal_flow.algorithms.losses import TokenLoss, decoupled_ppo_loss
from areal_flow.config import Recipe, load_recipe
from areal_flow.errors import RunError, TrainingError
from areal_flow.layout import RunLayout
from areal_flow.recovery.checkpoints import checkpoint_hashes
from areal_flow.recovery.comparison import ComparedStep, result_from_row
from areal_flow.recovery.plan import choose_checkpoint, request_from_row
from areal_flow.store.ledger import LedgerReader
from areal_flow.store.training_rows import TrainingRows
from areal_flow.trainer.inspection import (
    ClipWatch,
    TrajectoryOutcome,
    completion_logprobs,
    trajectory_outcomes,
)
from areal_flow.trainer.rank import TrainerRank
from areal_flow.trainer.sequences import TrainingSequence, sequences_from_rows
from areal_flow.types import PolicyHashes, StepRequest, StepResult
from areal_flow.weights.channel import HashingWriter
from pipelines.replay_settings import device_is_here

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """A computed step, and what it did to each of its trajectories."""

    result: StepResult
    outcomes: Sequence[TrajectoryOutcome]


class ReplayWalk:
    """A trainer that goes through the ledger, row by row, from a checkpoint on."""

    def __init__(
        self, layout: RunLayout, *, step: int | None = None, from_checkpoint: int | None = None
    ) -> None:
        self._rows = LedgerReader(layout.steps, layout.writers).rows()
        self.last_step = _checked_step(layout, step, head=len(self._rows) - 1)
        self._recipe = on_this_machine(load_recipe(layout.config))
        self._read_rows = TrainingRows(layout.trajectories, layout.writers)
        self._rank = TrainerRank(
            layout, self._recipe, channel=HashingWriter(), read_rows=self._read_rows
        )
        self.checkpoint, self._hashes = self._restore(layout, from_checkpoint)
        self._step = self.checkpoint
        self._forked = False

    def advance_to(self, step: int) -> Iterator[ComparedStep]:
        """Train the rows up to and with `step`; yield each beside what is recorded."""
        while self._step < step:
            _take_recorded_threads(self._next_row)
            yield self._compare(self._rank.step(self._next_request(self._recipe)))

    def advance_watching(self) -> tuple[ComparedStep, Sequence[TrajectoryOutcome]]:
        """Train the next row; return what it did to its trajectories, too."""
        watched = self._watch(self._rank, self._recipe, decoupled_ppo_loss)
        return self._compare(watched.result), watched.outcomes

    def try_next(self, recipe: Recipe, *, loss: TokenLoss) -> WatchedStep:
        """Return what the next row makes under other settings; the walk stays where it is."""
        random_state = torch.get_rng_state()
        watched = self._watch(self._rank.branch(recipe), recipe, loss)
        torch.set_rng_state(random_state)
        return watched

    def next_trajectories(self) -> tuple[Sequence[Mapping[str, Any]], list[tuple[float, ...]]]:
        """Return the rows that the next step trains, and their log-probabilities before it."""
        _take_recorded_threads(self._next_row)
        request = self._next_request(self._recipe)
        rows = self._read_rows(request.trajectory_ids)
        assert self._rank.state is not None
        return rows, completion_logprobs(
            self._rank.state, _sequences(rows, request), temperature=self._temperature
        )

    @property
    def _next_row(self) -> Mapping[str, Any]:
        return self._rows[self._step + 1]

    @property
    def _temperature(self) -> float:
        return self._recipe.generation.temperature

    def _next_request(self, recipe: Recipe) -> StepRequest:
        return request_from_row(
            self._next_row,
            parent_hash=self._hashes.weights_hash,
            max_staleness=recipe.controller.max_staleness,
        )

    def _compare(self, replayed: StepResult) -> ComparedStep:
        compared = ComparedStep(result_from_row(self._next_row), replayed, after_fork=self._forked)
        self._step, self._hashes = replayed.step, replayed.hashes
        self._forked = self._forked or not compared.equal
        return compared

    def _watch(self, rank: TrainerRank, recipe: Recipe, loss: TokenLoss) -> WatchedStep:
        _take_recorded_threads(self._next_row)
        request = self._next_request(recipe)
        rank.loss = watch = ClipWatch(loss)
        result = rank.step(request)
        rank.loss = loss
        assert rank.state is not None
        outcomes = trajectory_outcomes(
            rank.state,
            _sequences(self._read_rows(request.trajectory_ids), request),
            watch,
            step=request.step,
            settings=rank.settings,
            temperature=self._temperature,
        )
        return WatchedStep(result, outcomes)

    def _restore(self, layout: RunLayout, wanted: int | None) -> tuple[int, PolicyHashes]:
        found = checkpoint_hashes(layout.checkpoints)
        usable = {step: text for step, text in found.items() if wanted in (None, step)}
        earlier = self._rows[: self.last_step]
        while (checkpoint := choose_checkpoint(usable, earlier)) is not None:
            try:
                return checkpoint, self._restore_as_recorded(checkpoint)
            except TrainingError as error:
                logger.warning("%s", error)
                del usable[checkpoint]
        raise RunError(_no_checkpoint(layout, wanted, list(found), step=self.last_step))

    def _restore_as_recorded(self, checkpoint: int) -> PolicyHashes:
        hashes = self._rank.restore(checkpoint)
        recorded = result_from_row(self._rows[checkpoint]).hashes
        if hashes != recorded:
            raise TrainingError(
                f"checkpoint {checkpoint} was restored to {hashes}, the ledger has {recorded}"
            )
        return hashes


def _sequences(rows: Sequence[Mapping[str, Any]], request: StepRequest) -> list[TrainingSequence]:
    return sequences_from_rows(
        rows, policy_version=request.policy_version, max_staleness=request.max_staleness
    )


def _checked_step(layout: RunLayout, step: int | None, *, head: int) -> int:
    if head < 1:
        raise RunError(f"run {layout.name} has trained no step yet: there is nothing to replay")
    if step == 0:
        raise RunError(
            f"step 0 of run {layout.name} is the policy before training, made by the warm start or "
            f"taken from a model: it cannot be replayed; expected a step from 1 to {head}"
        )
    if step is not None and not 1 <= step <= head:
        raise RunError(f"run {layout.name} has no step {step}: expected a step from 1 to {head}")
    return head if step is None else step


def _no_checkpoint(
    layout: RunLayout, wanted: int | None, found: Sequence[int], *, step: int
) -> str:
    known = ", ".join(map(str, found)) or "none"
    if wanted is not None and (wanted not in found or wanted >= step):
        return (
            f"--from {wanted}: expected a checkpoint of run {layout.name} below step {step}, found "
            f"checkpoints of steps {known}"
        )
    which = "a checkpoint" if wanted is None else f"checkpoint {wanted}"
    return (
        f"run {layout.name} has no usable {which} below step {step}: expected one that can be read "
        f"and holds the weights of its ledger row, found checkpoints of steps {known}; try --from "
        "with an earlier one, or a later step"
    )


def on_this_machine(recipe: Recipe) -> Recipe:
    """Return the recipe with a device that is here; the numeric environment will tell."""
    if not device_is_here(recipe.trainer.device):
        trainer = recipe.trainer.model_copy(update={"device": "cpu"})
        return recipe.model_copy(update={"trainer": trainer})
    return recipe


def _take_recorded_threads(row: Mapping[str, Any]) -> None:
    """Sums depend on how many threads share them."""
    torch.set_num_threads(json.loads(row["numeric_environment"])["threads"])
