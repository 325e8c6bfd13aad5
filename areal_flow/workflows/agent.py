"""An agent of somebody's, written against any OpenAI SDK, as an episode.

The agent is a function that gets a `base_url` and an `api_key`; what it asks there the policy
answers, and its calls become trajectories. See `agent_session` for how, `agent_endpoint` for where.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, FiniteFloat

from areal_flow.errors import ArealFlowError, ConfigError
from areal_flow.import_path import import_function
from areal_flow.types import Prompt, Score
from areal_flow.workflows.agent_session import Session, reward_score
from areal_flow.workflows.context import EpisodeContext
from areal_flow.workflows.limits import TimedWorkflow
from areal_flow.workflows.protocol import TrajectoryDraft


class Agent(TimedWorkflow):
    """Runs an agent against the policy; its conversations are trained with its reward."""

    name: Literal["agent"] = "agent"
    """What an episode is; each workflow has settings of its own."""
    path: str
    """`package.module:function`, `async` or not. It takes what it names of `base_url`, `api_key`,
    `prompt` (the question's text), `answer`, `metadata` and the columns of the prompt's row, and
    returns a reward, or None if it posts one."""
    max_calls: int = Field(16, ge=1)
    """Calls of an episode; more are refused, and its trajectories count as cut."""
    missing_reward: Literal["discard", "score"] | FiniteFloat = "discard"
    """What becomes of an agent's conversations that it neither returns nor posts a reward for:
    discarded, scored by the recipe's rewards, or rewarded with this number."""

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        """Return a trajectory for each conversation of the agent's.

        Raises:
            ArealFlowError: the agent asked nothing.
            Exception: the agent's own.
        """
        from areal_flow.workflows.agent_endpoint import serving  # a server: only where one is

        agent = import_function(self.path, setting="workflow.path", error=ConfigError)
        session, is_late = Session(context, max_calls=self.max_calls), False
        limit = asyncio.timeout(self.max_seconds)
        try:
            async with serving(session) as (base_url, api_key), limit:
                reward = await _call(agent, prompt, base_url=base_url, api_key=api_key)
                if reward is not None and session.reward is None:
                    session.rewarded(float(reward))
        except Exception as error:
            is_late = isinstance(error, TimeoutError) and limit.expired()
            if session.failure is not None:
                raise session.failure from error
            if not is_late:
                raise
        drafts = [self._rewarded(draft) for draft in session.drafts(is_truncated=is_late)]
        if not drafts:
            raise ArealFlowError(f"the agent {self.path} had no answer from its base_url")
        return drafts

    def _rewarded(self, draft: TrajectoryDraft) -> TrajectoryDraft:
        if draft.score is not None or self.missing_reward == "score":
            return draft
        if self.missing_reward == "discard":
            missing = "the agent gave no reward: return or post one, or set workflow.missing_reward"
            return draft.scored(Score(None, "no_reward", error=missing))
        return draft.scored(reward_score(self.missing_reward))


async def _call(agent: Any, prompt: Prompt, **served: str) -> Any:
    """Call an agent with what it names; one that is not `async` runs in a thread."""
    given = {**prompt.metadata, **served, "prompt": prompt.text, "answer": prompt.answer}
    given["metadata"] = prompt.metadata
    parameters = inspect.signature(agent).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        given = {p.name: given[p.name] for p in parameters if p.name in given}
    if inspect.iscoroutinefunction(agent):
        return await agent(**given)
    return await asyncio.to_thread(agent, **given)
