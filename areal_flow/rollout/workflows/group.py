"""Runs a workflow for all members of a group; a member that fails does not end the others.

A member that fails becomes a trajectory without tokens, whose score has the error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from areal_flow.core.errors import ArealFlowError, EngineError, WeightsError
from areal_flow.core.failures import FailureCounts, cause_of
from areal_flow.core.types import Episode, Score
from areal_flow.rollout.workflows.context import EpisodeContext, EpisodeServices, contexts_of
from areal_flow.rollout.workflows.protocol import TrajectoryDraft, Workflow

FAILURES = FailureCounts("an episode")
"""Of the workflows of this process."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class RolledOutGroup:
    drafts: tuple[tuple[int, TrajectoryDraft], ...]
    """Each with its member; every member has at least one."""

    @property
    def errors(self) -> tuple[str, ...]:
        """Why members failed."""
        failed = (draft.score for _, draft in self.drafts if draft.finish_reason == "error")
        return tuple(score.error for score in failed if score)

    @property
    def has_failed(self) -> bool:
        """Whether every member failed."""
        return len(self.errors) == len(self.drafts)


async def run_group(
    workflow: Workflow, episode: Episode, services: EpisodeServices
) -> RolledOutGroup:
    contexts = contexts_of(episode, services)
    outcomes = await all_of(_run_member(workflow, episode, context) for context in contexts)
    return RolledOutGroup(
        tuple((member, draft) for member, outcome in enumerate(outcomes) for draft in outcome)
    )


async def all_of(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Await all side by side; the first that raises ends the others, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _run_member(
    workflow: Workflow, episode: Episode, context: EpisodeContext
) -> Sequence[TrajectoryDraft]:
    try:
        drafts = await workflow.run(episode.prompt, context)
        branches = [draft.branch for draft in drafts]
        if not branches or len(set(branches)) != len(branches):
            raise ArealFlowError(
                f"expected trajectories of different branches, found branches {branches}"
            )
        if not all(draft.loss_mask.any() for draft in drafts):
            raise ArealFlowError("expected a completion in each trajectory, found none in one")
        return drafts
    except (EngineError, WeightsError):
        raise
    except Exception as error:  # noqa: BLE001 - counted, and stored with its group
        FAILURES.note(error)
        score = Score(None, "error", error=cause_of(error))
        return [TrajectoryDraft(episode.prompt.tokens, finish_reason="error", score=score)]
