"""The policy calls tools: each answer is appended as tokens of the environment, and it goes on.

A call is written as `<tool>NAME INPUT</tool>`, which ends the completion; in a chat, as the chat
template has it. A tool is a function from text to text, which runs on a reward worker. Its answer,
or why there is none, is context, which the loss mask leaves out. The rewards read the last
completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

from pydantic import Field, field_validator

from areal_flow.core.errors import ArealFlowError, RewardError
from areal_flow.core.failures import in_own_thread
from areal_flow.core.settings import import_function, require
from areal_flow.core.types import Prompt, RewardPart, Score, Tokens
from areal_flow.rollout.workflows.episode import (
    EpisodeContext,
    TimedWorkflow,
    TrajectoryDraft,
    all_of,
)

TOOLS: dict[str, str] = {
    "calculator": "areal_flow.rollout.tools:calculate",
    "python": "areal_flow.rollout.tools:run_python",
}
ANSWERING = f"{__name__}:answer"
"""What calls a tool on a reward worker."""


def tools_by_name(names: tuple[str, ...]) -> dict[str, str]:
    """Return the import path of each tool by its name, which is that of its function."""
    tools: dict[str, str] = {}
    for given in names:
        if given not in TOOLS and ":" not in given:
            raise ValueError(
                f"workflow.tools: expected {', '.join(TOOLS)} or an import path such as "
                f"'my_package.my_module:my_tool', found {given!r}"
            )
        name = given.rpartition(":")[2]
        if name in tools:
            raise ValueError(f"workflow.tools: two tools are called {name!r}")
        tools[name] = TOOLS.get(given, given)
    return tools


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a policy asked for; without a name it is no call that could be read."""

    name: str
    text: str


def marked_call(text: str, *, start: str, end: str) -> ToolCall | None:
    """Return the call with which a completion ends: the tool's name and its input between marks."""
    before, marker, _ = text.rpartition(end)
    _, began, call = before.rpartition(start)
    if not marker:
        return None
    name, *rest = call.split(maxsplit=1) or [""]
    return ToolCall(name, "".join(rest)) if began else ToolCall("", call)


def answer(path: str, text: str, timeout_s: float, max_characters: int) -> str:
    """Return what a tool returns for the text of a call, or why it returned nothing.

    A `RewardError`, which is an error of the infrastructure, is raised.
    """
    tool = import_function(path, setting="workflow.tools", error=ArealFlowError)
    call = in_own_thread(lambda: str(tool(text)), name="tool")
    wait([call], timeout_s)
    if not call.done():
        message = f"Error: no result within {timeout_s:g} s"
    elif error := call.exception():
        if isinstance(error, RewardError):
            raise error
        message = f"Error: {type(error).__name__}: {error}"
    else:
        message = call.result()
    message = message.encode(errors="replace").decode()  # a lone surrogate has no tokens
    left_out = len(message) - max_characters
    return (
        message if left_out <= 0 else f"{message[:max_characters]} ({left_out} characters left out)"
    )


class ToolUse(TimedWorkflow):
    """One conversation with tools, up to `max_calls` calls."""

    name: Literal["tool_use"] = "tool_use"
    """What an episode is; each workflow has its own settings."""
    tools: tuple[str, ...] = Field(("calculator",), min_length=1, strict=False)
    """`calculator`, `python` (in a sandbox), or the import path of a function from text to text."""
    call_start: str = Field("<tool>", min_length=1)
    """Text before a call: the tool's name and its input."""
    call_end: str = Field("</tool>", min_length=1)
    """Text after a call; also in `generation.stop.strings`."""
    result_template: str = "<result>{result}</result>"
    """How the policy reads a tool's answer."""
    max_calls: int = Field(4, ge=0)
    """The most calls of an episode."""
    call_cost: float = 0.0
    """Subtracted from the reward for each call."""
    timeout_s: float = Field(30.0, gt=0)
    """The limit of a call."""
    max_result_characters: int = Field(2000, ge=1)
    """A longer answer of a tool is cut."""

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
            calls = self._calls(draft.tokens, completion.tokens, context)
            draft = draft.with_completion(completion)
            if not calls or completion.finish_reason != "stop":
                break
            if limit := self.time_limit(context):
                break
            if num_calls + len(calls) > self.max_calls:
                limit = f"workflow.max_calls ({self.max_calls})"
                break
            num_calls += len(calls)
            results = await all_of(self._answer(call, context) for call in calls)
            answered = draft.with_environment(self._shown(results, draft, context))
            if context.num_tokens_left(answered.tokens) < 1:
                limit = "generation.max_model_len"
                break
            draft = answered
        score = self._with_calls(await context.score(completion.tokens), num_calls)
        draft = draft.scored(score)
        return [draft.cut_by(limit) if limit else draft]

    def _calls(self, prompt: Tokens, answer: Tokens, context: EpisodeContext) -> list[ToolCall]:
        if context.is_chat:
            return [ToolCall(*call) for call in context.chat_calls(prompt, answer)]
        call = marked_call(context.decode(answer), start=self.call_start, end=self.call_end)
        return [call] if call else []

    def _shown(
        self, results: Sequence[str], draft: TrajectoryDraft, context: EpisodeContext
    ) -> Tokens:
        if context.is_chat:
            return context.tool_turn(*results, after=draft.tokens)
        (result,) = results  # a text has one call, at its end
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
