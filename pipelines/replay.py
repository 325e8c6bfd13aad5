"""A run directory in, its steps computed again out: in this process, and nothing is written.

A checkpoint is loaded, the ledger's later rows are trained again from the log, each compared with
what is recorded. The step asked for can be computed a second time from the same state, with other
settings or another loss: what would it have been?
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from areal_flow.algorithms.protocol import TokenLoss
from areal_flow.config import load_recipe
from areal_flow.layout import RunLayout
from areal_flow.recovery.comparison import ComparedStep
from areal_flow.trainer.inspection import InspectedTrajectory, inspect_trajectory
from areal_flow.types import PolicyHashes, StepResult
from pipelines.replay_settings import changed_recipe, describe_changes
from pipelines.replay_walk import ReplayWalk, WatchedStep, on_this_machine


@dataclass(frozen=True, slots=True)
class Replayed:
    """A step as recorded, as replayed and, if anything was changed, as it would have been."""

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
        """Return the steps that differ where they must not."""
        return tuple(c for c in (*self.before, self.compared) if c.refused)


def replay_step(
    layout: RunLayout,
    *,
    step: int,
    from_checkpoint: int | None = None,
    changes: Mapping[str, Any] | None = None,
    loss: TokenLoss | None = None,
) -> Replayed:
    """Compute one step again, from the newest checkpoint below it or from a given one.

    Args:
        changes: settings to compute the step with a second time, a nested table as in a recipe.
        loss: to minimise that second time.

    Raises:
        RunError: there is no such step, or no checkpoint to start from.
        ConfigError: a changed setting is wrong.
    """
    recipe = changed_recipe(layout.config, changes or {})
    with _threads_restored():
        walk = ReplayWalk(layout, step=step, from_checkpoint=from_checkpoint)
        before = tuple(walk.advance_to(step - 1))
        rows, proximal = walk.next_trajectories()
        changed: WatchedStep | None = None
        if changes or loss:
            changed = walk.try_next(on_this_machine(recipe), loss=loss)
        compared, outcomes = walk.advance_watching()
    trajectories = tuple(
        inspect_trajectory(
            row,
            policy_version=step - 1,
            proximal_logprobs=proximal[index],
            replayed=outcomes[index],
            changed=changed.outcomes[index] if changed else None,
        )
        for index, row in enumerate(rows)
    )
    return Replayed(
        walk.checkpoint,
        before,
        compared,
        changed.result if changed else None,
        describe_changes(load_recipe(layout.config), recipe, loss=loss),
        trajectories,
    )


def replay_to(
    layout: RunLayout, step: int | None = None, *, from_checkpoint: int | None = None
) -> tuple[ComparedStep, ...]:
    """Compute every step after a checkpoint again, up to one (the ledger's newest, if None).

    Raises:
        RunError: there is no such step, or no checkpoint to start from.
    """
    with _threads_restored():
        walk = ReplayWalk(layout, step=step, from_checkpoint=from_checkpoint)
        return tuple(walk.advance_to(walk.last_step))


def replay_from_genesis(layout: RunLayout) -> PolicyHashes:
    """Compute the whole run again from checkpoint 0; return what its last step made.

    Raises:
        RunError: the run has trained no step, or checkpoint 0 is gone.
    """
    return replay_to(layout, from_checkpoint=0)[-1].replayed.hashes


@contextmanager
def _threads_restored() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
