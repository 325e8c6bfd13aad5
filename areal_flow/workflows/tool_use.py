"""The policy calls tools: each answer is appended as tokens of the environment, and it goes on.

A call is written as `<tool>NAME INPUT</tool>`, which ends the completion; in a chat, as the chat
template has it. Tokens of the environment are context: the loss mask leaves them out, and nothing
is ever tokenised again. What the policy does wrong (an unknown tool, an input that fails) is
the answer that it gets. The rewards read the last completion: what a tool returned is no answer
of the policy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Literal

from pydantic import Field, field_validator

from areal_flow.settings import require
from areal_flow.types import Prompt, RewardPart, Score, Tokens
from areal_flow.workflows.context import EpisodeContext
from areal_flow.workflows.group import all_of
from areal_flow.workflows.protocol import TimedWorkflow, TrajectoryDraft
from areal_flow.workflows.tools import ANSWERING, ToolCall, marked_call, tools_by_name


class ToolUse(TimedWorkflow):
    """One conversation with tools, up to `max_calls` calls."""

    name: Literal["tool_use"] = "tool_use"
    """What an episode is; each workflow has settings of its own."""
    tools: tuple[str, ...] = Field(("calculator",), min_length=1, strict=False)
    """What may be called: `calculator`, `python` (in a sandbox), or the import path of a function
    from text to text."""
    call_start: str = Field("<tool>", min_length=1)
    """What stands before a call: the tool's name, white space and its input."""
    call_end: str = Field("</tool>", min_length=1)
    """What ends a call; `generation.stop.strings` must have it, so that the completion ends."""
    result_template: str = "<result>{result}</result>"
    """How a tool's answer is shown to the policy."""
    max_calls: int = Field(4, ge=0)
    """Calls of an episode; one more ends it."""
    call_cost: float = 0.0
    """Taken off the reward for each call."""
    timeout_s: float = Field(30.0, gt=0)
    """How long a call may take."""
    max_result_characters: int = Field(2000, ge=1)
    """Of a tool's answer; the rest is left out."""

    @field_validator("tools")
    @classmethod
    def _are_known(cls, tools: tuple[str, ...]) -> tuple[str, ...]:
        tools_by_name(tools)
        return tools

    @field_validator("result_template")
    @classmethod
    def _has_a_place(cls, template: str) -> str:
        require("{result}" in template, "workflow.result_template must contain {result}")
        return template

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        """Return one trajectory, which ends with a completion and is scored by it."""
        draft, num_calls, limit = TrajectoryDraft(prompt.tokens), 0, ""
        for turn in count():
            completion = await context.generate(draft.tokens, turn)
            draft = draft.with_completion(completion)
            calls = self._calls(completion.tokens, context)
            if not calls or completion.finish_reason != "stop":
                break
            if limit := self.time_limit(context):
                break
            if num_calls + len(calls) > self.max_calls:
                limit = f"workflow.max_calls ({self.max_calls})"
                break
            num_calls += len(calls)
            results = await all_of(self._answer(call, context) for call in calls)
            answered = draft.with_environment(self._shown("\n".join(results), draft, context))
            if context.num_tokens_left(answered.tokens) < 1:
                limit = "generation.max_model_len"
                break
            draft = answered
        score = self._with_calls(await context.score(completion.tokens), num_calls)
        draft = draft.scored(score)
        return [draft.cut_by(limit) if limit else draft]

    def _calls(self, answer: Tokens, context: EpisodeContext) -> list[ToolCall]:
        if context.is_chat:
            return [ToolCall(*call) for call in context.chat_calls(answer)]
        call = marked_call(context.decode(answer), start=self.call_start, end=self.call_end)
        return [call] if call else []

    def _shown(self, result: str, draft: TrajectoryDraft, context: EpisodeContext) -> Tokens:
        if context.is_chat:
            return context.tool_turn(result, after=draft.tokens)
        return context.encode(self.result_template.replace("{result}", result))

    async def _answer(self, call: ToolCall, context: EpisodeContext) -> str:
        paths = tools_by_name(self.tools)
        if call.name not in paths:
            return f"Error: expected one of the tools {', '.join(paths)}, found {call.name!r}"
        limits = self.timeout_s, self.max_result_characters
        return str(await context.call_tool(ANSWERING, paths[call.name], call.text, *limits))

    def _with_calls(self, score: Score, num_calls: int) -> Score:
        """Return the score less the cost of calls, whose number becomes one of its parts."""
        parts = (*score.parts, RewardPart("tool_calls", float(num_calls)))
        reward = score.reward if score.reward is None else score.reward - self.call_cost * num_calls
        return replace(score, reward=reward, parts=parts)
