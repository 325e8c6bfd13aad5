"""The policy acts in an environment of an OpenEnv server, which gives the rewards.

The first observation follows the question. Each completion is an action, without its reasoning, or
calls tools of the environment; what comes back is context, which the loss mask leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from areal_flow.core.errors import ConfigError, PromptError, RewardError
from areal_flow.core.settings import require
from areal_flow.core.types import Prompt, RewardPart, Score, Tokens, ToolRecord
from areal_flow.policy.tokenizer.chat import (
    INPUT,
    PROMPT_END,
    Tool,
    ToolCall,
    begins_reasoning,
    blank_reasoning,
)
from areal_flow.rollout.workflows.episode import EpisodeContext, TimedWorkflow, TrajectoryDraft
from areal_flow.rollout.workflows.tool_use import shortened

if TYPE_CHECKING:
    from areal_flow.rollout.workflows.openenv_client import Environment

PORT = "{port}"
"""Stands for the port in a server's command."""
STEP = "step"
"""The name, in the log, of an action that calls no tool."""


class OpenEnvError(RewardError):
    """A server cannot be reached, reports an error or was lost: the member has no reward."""


class ActionRefused(OpenEnvError):
    """A value of an action does not fit the environment's schema."""


class OpenEnv(TimedWorkflow):
    """An episode in an environment of an OpenEnv server."""

    name: Literal["openenv"] = "openenv"
    """What an episode is; each workflow has its own settings."""
    server: str
    """The address of a server, or a command with `{port}` that starts one for each generator."""
    mcp: bool = False
    """Whether the policy acts by calling the environment's MCP tools; needs a chat template."""
    action_field: str = ""
    """The field of an action that a completion fills; empty: a completion is an action in JSON."""
    observation_field: str = ""
    """The field, or dotted path, of an observation that the policy reads; empty: all, as JSON."""
    observation_template: str = "\n{observation}\n"
    """How the policy reads an observation; with a chat template, the content of a user turn."""
    max_observation_characters: int = Field(4000, ge=1)
    """A longer observation is cut."""
    reset_fields: tuple[str, ...] = Field((), strict=False)
    """Columns of the prompt's row that `reset` gets, such as `seed`."""
    episode_reward: Literal["sum", "last"] = "sum"
    """Which rewards of its steps an episode gets."""
    max_actions: int = Field(16, ge=1)
    """The most actions of an episode."""
    timeout_s: float = Field(60.0, gt=0)
    """The limit of a step, and of a server's start."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        is_address = self.server.startswith(("http://", "https://", "ws://", "wss://"))
        require(
            is_address or PORT in self.server,
            "workflow.server must be an address, such as http://127.0.0.1:8000, or a command with "
            "{port}",
        )
        has_place = "{observation}" in self.observation_template
        require(has_place, "workflow.observation_template must contain {observation}")
        return self

    @property
    def gives_rewards(self) -> bool:
        return True

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        """Return one trajectory, scored by the environment."""
        # Imported here: other workflows need no HTTP client.
        from aiohttp import ClientSession

        from areal_flow.rollout.workflows.openenv_client import Environment

        async with ClientSession() as http:  # closing it ends the environment
            return [await self._episode(prompt, context, Environment(http, self))]

    async def _episode(
        self, prompt: Prompt, context: EpisodeContext, environment: Environment
    ) -> TrajectoryDraft:
        tools = await environment.tools() if self.mcp else []
        names = [tool["function"]["name"] for tool in tools] or [STEP]
        first = await environment.ask("reset", self._reset_arguments(prompt))
        text = self._cut(self._shown(first["observation"]))
        draft = TrajectoryDraft(self._first_tokens(prompt, text, tools, context))
        rewards, is_done, limit = list[float](), False, ""
        for turn in count():
            completion = await context.generate(draft.tokens, turn)
            calls = self._calls(draft.tokens, completion.tokens, context)
            draft, texts = draft.with_completion(completion), list[str]()
            if not calls or completion.finish_reason != "stop":
                break
            for call in calls[: self.max_actions - len(rewards)]:
                if is_done:
                    break
                began = monotonic()
                text, reward, is_done = await self._step(call, names, environment)
                texts.append(self._cut(text))
                rewards.append(reward)
                name, arguments = call.name or STEP, json.dumps(call.arguments)
                record = ToolRecord(turn, name, arguments, texts[-1], None, monotonic() - began)
                draft = draft.with_calls([record])
            if is_done:
                break
            if len(rewards) == self.max_actions:
                limit = f"workflow.max_actions ({self.max_actions})"
                break
            if limit := self.time_limit(context):
                break
            if self.mcp:
                tokens = context.tool_turn(*texts, after=draft.tokens)
            else:
                tokens = context.user_turn(*map(self._templated, texts), after=draft.tokens)
            extended = draft.with_environment(tokens)
            if context.num_tokens_left(extended.tokens) < 1:
                limit = "generation.max_model_len"
                break
            draft = extended
        state = as_text(await environment.ask("state"))
        draft = draft.scored(self._score(rewards, draft.tool_calls, self._cut(state)))
        return draft.cut_by(limit) if limit else draft

    def _reset_arguments(self, prompt: Prompt) -> dict[str, Any]:
        if missing := [name for name in self.reset_fields if name not in prompt.metadata]:
            raise PromptError(f"prompt {prompt.prompt_id}: no column {missing[0]!r} to reset with")
        return {name: prompt.metadata[name] for name in self.reset_fields}

    def _first_tokens(
        self, prompt: Prompt, text: str, tools: Sequence[Tool], context: EpisodeContext
    ) -> Tokens:
        """Return the prompt with the tools, and with the first observation unless it is empty."""
        shown = self._templated(text) if text else ""
        if not context.is_chat:
            return np.concatenate((prompt.tokens, context.encode(shown)))
        *earlier, last = context.conversation(prompt)
        content = f"{last['content']}{shown.rstrip()}"
        return context.chat([*earlier, {**last, "content": content}], tools)

    def _templated(self, text: str) -> str:
        return self.observation_template.replace("{observation}", text)

    def _cut(self, text: str) -> str:
        return shortened(text, self.max_observation_characters)

    def _calls(self, prompt: Tokens, answer: Tokens, context: EpisodeContext) -> list[ToolCall]:
        """Return the actions of an answer; the name of a malformed one is empty."""
        if self.mcp:
            return [*context.chat_calls(prompt, answer)]
        is_thinking = begins_reasoning(context.decode(prompt[-PROMPT_END:]))
        text = blank_reasoning(context.decode(answer), has_begun=is_thinking)
        text = text.replace("\0", "").strip()
        if self.action_field:
            return [ToolCall(STEP, {self.action_field: text})]
        try:
            return [ToolCall(STEP, dict(json.loads(text)))]
        except (ValueError, TypeError, RecursionError):
            return [ToolCall("", {INPUT: text})]

    async def _step(
        self, call: ToolCall, names: Collection[str], environment: Environment
    ) -> tuple[str, float, bool]:
        """Take an action; return what the policy reads, its reward, and whether it was the last."""
        if call.name not in names:
            expected = f"expected one of the tools {', '.join(names)}, found {call.name!r}"
            return f"Error: {expected if self.mcp else 'expected a JSON object'}", 0.0, False
        action = call.arguments
        if self.mcp:
            action = {"type": "call_tool", "tool_name": call.name, "arguments": action}
        try:
            step = await environment.ask("step", action, by_policy=True)
        except ActionRefused as refusal:
            return f"Error: {refusal}", 0.0, False
        observation, reward = step["observation"], float(step["reward"] or 0.0)
        text = result_text(observation) if self.mcp else self._shown(observation)
        return text, reward, step["done"]

    def _shown(self, observation: Any) -> str:
        for name in filter(None, self.observation_field.split(".")):
            if not isinstance(observation, Mapping) or name not in observation:
                raise ConfigError(
                    f"workflow.observation_field = {self.observation_field!r}: expected a field "
                    f"{name!r}, found {observation!r:.200}"
                )
            observation = observation[name]
        return as_text(observation)

    def _score(self, rewards: Sequence[float], calls: Sequence[ToolRecord], state: str) -> Score:
        num_errors = sum(call.result.startswith("Error:") for call in calls)
        sums = {"sum": sum(rewards), "last": rewards[-1] if rewards else 0.0}
        counts = {"steps": float(len(rewards)), "errors": float(num_errors)}
        return Score(
            sums[self.episode_reward],
            parts=tuple(RewardPart(*part) for part in {**sums, **counts}.items()),
            extra={"step_rewards": list(rewards), "state": state},
        )


def result_text(observation: Mapping[str, Any]) -> str:
    """Return the texts that an MCP tool returned, or its error."""
    if error := observation.get("error"):
        return f"Error: {error['message']}"
    result = observation.get("result")
    if isinstance(result, Mapping) and "content" in result:
        return "\n".join(part.get("text", "") for part in result["content"])
    return as_text(result)


def as_text(value: Any) -> str:
    """Return a text as it is, and anything else as JSON, but nothing if it is empty."""
    if isinstance(value, str):
        return value
    return "" if value in (None, {}) else json.dumps(value, ensure_ascii=False)
