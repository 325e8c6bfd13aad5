"""An episode that runs a user's agent, written against any OpenAI SDK.

The agent is a function that gets a `base_url` and an `api_key`, served by `agent_endpoint`. Its
calls become conversations (`agent_session`), each of them a trajectory.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field, FiniteFloat

from areal_flow.core.errors import ArealFlowError, ConfigError
from areal_flow.core.failures import in_own_thread
from areal_flow.core.types import Prompt, Score
from areal_flow.rewards.shipping import function_name, load_function
from areal_flow.rollout.workflows.agent_session import Session
from areal_flow.rollout.workflows.episode import EpisodeContext, TimedWorkflow, TrajectoryDraft


class Agent(TimedWorkflow):
    """Runs an agent against the policy; its conversations are trained with its reward."""

    name: Literal["agent"] = "agent"
    """What an episode is; each workflow has its own settings."""
    path: str
    """`package.module:function`, `async` or not. It may take `base_url`, `api_key`, `prompt`,
    `answer`, `metadata` and columns of the row, and returns a reward, or None if it posts one."""
    max_calls: int = Field(16, ge=1)
    """Calls of an episode, each choice of a call being one; more are refused, and its trajectories
    count as cut."""
    missing_reward: Literal["discard", "score"] | FiniteFloat = "discard"
    """Conversations without a reward are discarded, scored by the recipe's rewards, or get this
    number."""

    @property
    def gives_rewards(self) -> bool:
        return self.missing_reward != "score"

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        """Return a trajectory for each conversation of the agent.

        An agent that ends because it used up its calls, seconds or context has not failed: its
        conversations are truncated. If it continues after one context was full, only that one is.
        """
        # Imported here: only agents need an HTTP server.
        from areal_flow.rollout.workflows.agent_endpoint import serving

        agent = load_function(self.path, setting="workflow.path", error=ConfigError)
        session = Session(context, max_calls=self.max_calls)
        limit = asyncio.timeout(self.episode_timeout_s)
        reward = None
        try:
            async with serving(session) as (base_url, api_key), limit:
                reward = await _call(agent, prompt, base_url=base_url, api_key=api_key)
        except Exception as error:
            if session.failure is not None:
                raise session.failure from error
            if isinstance(error, TimeoutError) and limit.expired():
                session.ended_by = f"workflow.episode_timeout_s ({self.episode_timeout_s:g})"
            elif exceeded := session.limit_behind(error):
                session.ended_by = exceeded
            else:
                raise
        if reward is not None and session.reward is None:
            session.set_reward(reward)
        drafts = [await self._finished(*each, context) for each in session.drafts()]
        if not drafts:
            limits = session.ended_by or ", ".join(session.limits.values())
            raise ArealFlowError(
                f"the agent {function_name(self.path)} had no answer from its base_url"
                + (f": ended by {limits}" if limits else "")
            )
        return drafts

    async def _finished(
        self, draft: TrajectoryDraft, limit: str, context: EpisodeContext
    ) -> TrajectoryDraft:
        score, missing = draft.score, self.missing_reward
        if score is None and missing == "discard":
            by = f" before it was ended by {limit}" if limit else ""
            advice = "return or post one, or set workflow.missing_reward"
            score = Score(None, "no_reward", error=f"the agent gave no reward{by}: {advice}")
        elif score is None and not isinstance(missing, str):
            score = Score(missing)
        elif score is None and limit:  # else no message would name the limit
            score = await context.score(draft.output_tokens)
        draft = draft.scored(score) if score else draft
        return draft.cut_by(limit) if limit else draft


async def _call(agent: Any, prompt: Prompt, **served: str) -> Any:
    """Call an agent with the arguments that it names; in its own thread unless it is `async`."""
    arguments = {**prompt.metadata, **served, "prompt": prompt.text, "answer": prompt.answer}
    arguments["metadata"] = dict(prompt.metadata)
    parameters = inspect.signature(agent).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        arguments = {p.name: arguments[p.name] for p in parameters if p.name in arguments}
    try:
        if any(map(inspect.iscoroutinefunction, (agent, agent.__call__))):
            return await agent(**arguments)
        # Not in the event loop's own threads, which are few and load weights.
        return await asyncio.wrap_future(in_own_thread(partial(agent, **arguments), name="agent"))
    except SystemExit as exit_:  # which would end the generator
        raise ArealFlowError(
            f"the agent called sys.exit({exit_.code!r}): it must return a reward"
        ) from exit_
