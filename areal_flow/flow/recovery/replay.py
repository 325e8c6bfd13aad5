"""Recomputes recorded steps in this process: to compare them, to try other settings, or to fork.

Nothing is written into the replayed run, which may be running. How a replay is shown is left to the
command line.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from areal_flow.algorithms.protocol import TokenLoss
from areal_flow.config import Recipe, load_recipe
from areal_flow.core.errors import RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.core.types import PolicyHashes, StepRequest, StepResult
from areal_flow.flow.recovery.replay_settings import (
    changed_recipe,
    describe_changes,
    on_device,
    on_this_machine,
)
from areal_flow.flow.recovery.restore import ComparedStep, LedgerReplay, restore_newest
from areal_flow.log.directory import Parent, check_schema_version, record_parent
from areal_flow.log.inputs import reference_directory
from areal_flow.log.ledger import LedgerReader
from areal_flow.log.trajectories import TrainingRows
from areal_flow.policy.checkpoints import CheckpointState, checkpoint_hashes, forked_policies
from areal_flow.policy.weights.channel import HashingWriter
from areal_flow.training.checkpoint import take_snapshot, write_checkpoint
from areal_flow.training.inspection import (
    ClipWatch,
    InspectedTrajectory,
    TrajectoryOutcome,
    completion_logprobs,
    inspect_trajectories,
    trajectory_outcomes,
)
from areal_flow.training.rank import TrainerRank
from areal_flow.training.sequences import TrainingSequence, sequences_from_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replayed:
    checkpoint: int
    """The step whose checkpoint the replay began with."""
    before: tuple[ComparedStep, ...]
    """The steps between that checkpoint and this one."""
    compared: ComparedStep
    changed: StepResult | None
    changes: Mapping[str, tuple[Any, Any]]
    """Recorded and changed value, by dotted name."""
    trajectories: tuple[InspectedTrajectory, ...]
    """What the step consumed, in its order."""

    @property
    def recorded(self) -> StepResult:
        return self.compared.recorded

    @property
    def replayed(self) -> StepResult:
        return self.compared.replayed

    @property
    def refused(self) -> tuple[ComparedStep, ...]:
        return tuple(c for c in (*self.before, self.compared) if c.refused)


def replay_step(
    layout: RunLayout,
    *,
    step: int,
    from_checkpoint: int | None = None,
    changes: Mapping[str, Any] | None = None,
    loss: TokenLoss | None = None,
) -> Replayed:
    """Compute a step again from a checkpoint below it, and once more with changes or a loss."""
    recipe = changed_recipe(layout.config, changes or {})
    local = LocalTrainer(layout, on_this_machine(load_recipe(layout.config)))
    _check_step(layout, step, head=local.ledger.head)

    async def replay() -> Replayed:
        hashes = checkpoint_hashes(layout.checkpoints)
        usable = {at: text for at, text in hashes.items() if from_checkpoint in (None, at)}
        replay = await local.begin(usable, at_most=step - 1)
        if replay is None:
            raise RunError(_no_checkpoint(layout, from_checkpoint, list(hashes), step=step))
        before = [await replay.advance() for _ in range(replay.step + 1, step)]
        request = replay.next_request
        sequences = local.sequences(request)
        local.take_recorded_threads(request)
        proximal = completion_logprobs(
            local.rank.backend, sequences, temperature=local.recipe.generation.temperature
        )
        changed, changed_outcomes = None, None
        if changes or loss:
            changed, changed_outcomes = local.try_step(request, on_this_machine(recipe), loss=loss)
        local.rank.loss = ClipWatch(local.recipe.algorithm.loss)
        compared = await replay.advance()
        outcomes = local.outcomes(local.rank, request)
        return Replayed(
            replay.checkpoint,
            tuple(before),
            compared,
            changed,
            describe_changes(load_recipe(layout.config), recipe, loss=loss),
            inspect_trajectories(request, sequences, proximal, outcomes, changed_outcomes),
        )

    with threads_kept():
        return asyncio.run(replay())


@contextmanager
def threads_kept() -> Iterator[None]:
    """Restore torch's number of threads afterwards."""
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class LocalTrainer:
    """A `RestorableTrainer`: one rank in this process. Its weights are hashed, never served."""

    def __init__(self, layout: RunLayout, recipe: Recipe) -> None:
        check_schema_version(layout)
        self._forks = layout.forks
        self.ledger = LedgerReader(layout)
        self.recipe = recipe
        self.rank = TrainerRank(
            layout,
            recipe.for_trainer(),
            channel=HashingWriter(),
            read_rows=TrainingRows(layout),
            find_teacher=partial(reference_directory, layout),
        )

    async def begin(self, checkpoints: Mapping[int, str], *, at_most: int) -> LedgerReplay | None:
        return await restore_newest(
            self,
            self.ledger,
            checkpoints,
            forks=forked_policies(self._forks),
            at_most=at_most,
            max_staleness=self.recipe.controller.max_staleness,
            on_damaged=lambda _, error: logger.warning("%s", error),
        )

    async def restore(self, checkpoint: int) -> PolicyHashes:
        return self.rank.restore(checkpoint)

    async def step(self, request: StepRequest) -> StepResult:
        await asyncio.sleep(0)  # where Ctrl-C is noticed
        self.take_recorded_threads(request)
        return self.rank.step(request)

    def try_step(
        self, request: StepRequest, recipe: Recipe, *, loss: TokenLoss | None
    ) -> tuple[StepResult, list[TrajectoryOutcome]]:
        """Compute a step under other settings; the rank stays where it is."""
        request = replace(request, max_staleness=recipe.controller.max_staleness)
        random_state = torch.get_rng_state()
        branch = self.rank.branch(
            recipe.for_trainer(), loss=ClipWatch(loss or recipe.algorithm.loss)
        )
        result = branch.step(request)
        torch.set_rng_state(random_state)
        return result, self.outcomes(branch, request)

    def outcomes(self, rank: TrainerRank, request: StepRequest) -> list[TrajectoryOutcome]:
        return trajectory_outcomes(
            rank.backend,
            self.sequences(request),
            rank.numbers,
            rank.loss,
            temperature=self.recipe.generation.temperature,
        )

    def sequences(self, request: StepRequest) -> list[TrainingSequence]:
        rows = self.rank.read_rows(request.trajectory_ids)
        return sequences_from_rows(
            rows, policy_version=request.policy_version, max_staleness=request.max_staleness
        )

    def take_recorded_threads(self, request: StepRequest) -> None:
        """Use as many threads as the recorded step did: sums depend on how many share them."""
        row = self.ledger.row(request.step, ["numeric_environment"])
        torch.set_num_threads(json.loads(row["numeric_environment"])["threads"])


def _check_step(layout: RunLayout, step: int, *, head: int) -> None:
    if head < 1:
        raise RunError(f"run {layout.name} has trained no step yet: there is nothing to replay")
    if step == 0:
        raise RunError(
            f"step 0 of run {layout.name} is the policy before training, made by the warm start or "
            f"taken from a model: it cannot be replayed; expected a step from 1 to {head}"
        )
    if not 1 <= step <= head:
        raise RunError(f"run {layout.name} has no step {step}: expected a step from 1 to {head}")


def _no_checkpoint(
    layout: RunLayout, requested: int | None, checkpoints: Sequence[int], *, step: int
) -> str:
    steps = ", ".join(map(str, checkpoints)) or "none"
    if requested is not None and (requested not in checkpoints or requested >= step):
        return (
            f"--from {requested}: expected a checkpoint of run {layout.name} below step {step}, "
            f"found checkpoints of steps {steps}"
        )
    which = "a checkpoint" if requested is None else f"checkpoint {requested}"
    return (
        f"run {layout.name} has no usable {which} below step {step}: expected one that can be read "
        f"and holds the weights of its ledger row, found checkpoints of steps {steps}; try --from "
        "with an earlier one, or a later step"
    )


async def write_version_0(
    layout: RunLayout,
    recipe: Recipe,
    writer: Writer,
    *,
    parent: RunLayout,
    step: int | None,
    fresh_optimizer: str,
    on_replayed: Callable[[int, int], None],
) -> None:
    """Write checkpoint 0 of a fork from a step of its parent, by default its newest checkpoint's.

    The step is loaded from its checkpoint, or replayed from the nearest earlier one.
    """
    checkpoints = checkpoint_hashes(parent.checkpoints)
    parent_recipe = on_this_machine(load_recipe(parent.config))
    if step is None or step in checkpoints:  # only copied: the run's own workers need the GPUs
        parent_recipe = on_device(parent_recipe, "cpu")
    local = LocalTrainer(parent, parent_recipe)
    last = local.ledger.head if step is None else step
    with threads_kept():
        replay = await local.begin(checkpoints, at_most=last)
        if replay is None:
            raise RunError(
                f"run {parent.name} has no usable checkpoint up to step {last}: expected one that "
                "can be read and holds the weights of its ledger row, found checkpoints of steps "
                f"{', '.join(map(str, checkpoints)) or 'none'}"
            )
        while step is not None and replay.step < step:
            on_replayed(replay.step + 1, step)
            compared = await replay.advance()
            if compared.forked:
                raise RunError(
                    f"step {compared.step} of run {parent.name} was replayed to weights "
                    f"{compared.replayed.hashes.weights_hash}, its ledger has "
                    f"{compared.recorded.hashes.weights_hash}: expected the same; fork from a step "
                    f"with a checkpoint, {', '.join(map(str, checkpoints))}"
                )
    weights_hash = replay.hashes.weights_hash
    description = CheckpointState(0, weights_hash, 0, recipe.digest())
    snapshot = take_snapshot(local.rank.backend, description, recipe.trainer.lora)
    if fresh_optimizer:
        snapshot = replace(snapshot, optimizer={})
    write_checkpoint(layout.checkpoints, parent.model, snapshot, writer)
    run_id, optimizer = check_schema_version(parent), fresh_optimizer or "kept"
    record_parent(layout, Parent(run_id, parent.name, replay.step, weights_hash, optimizer))
