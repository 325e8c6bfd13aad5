"""The policy calls tools, whose results are appended as tokens of the environment.

A call is `<tool>NAME INPUT</tool>`, which ends the completion; in a chat, it has the format of the
chat template. A tool is a function from text to text that runs on a reward worker. Its result, or
an error message, is context, which the loss mask leaves out. The rewards judge the last completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

from pydantic import Field, field_validator

from areal_flow.core.concurrency import all_of
from areal_flow.core.errors import ArealFlowError, RewardError
from areal_flow.core.failures import in_own_thread
from areal_flow.core.settings import require
from areal_flow.core.types import Prompt, RewardPart, Score, Tokens
from areal_flow.rewards.shipping import function_name, load_function
from areal_flow.rollout.workflows.episode import (
    EpisodeContext,
    TimedWorkflow,
    TrajectoryDraft,
)

TOOLS: dict[str, str] = {
    "calculator": "areal_flow.rollout.tools:calculate",
    "python": "areal_flow.rollout.tools:run_python",
}
CALL_TOOL = f"{__name__}:tool_result"
"""Runs on a reward worker, and calls the tool there."""


def tools_by_name(names: tuple[str, ...]) -> dict[str, str]:
    """Return the import path of each tool by the name of its function."""
    tools: dict[str, str] = {}
    for tool in names:
        if tool not in TOOLS and ":" not in tool:
            raise ValueError(
                f"workflow.tools: expected {', '.join(TOOLS)} or an import path such as "
                f"'my_package.my_module:my_tool', found {tool!r}"
            )
        name = function_name(tool)
        if name in tools:
            raise ValueError(f"workflow.tools: two tools are called {name!r}")
        tools[name] = TOOLS.get(tool, tool)
    return tools


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool's name, empty if the call is malformed, and the text that the tool gets."""

    name: str
    text: str


def marked_call(text: str, *, start: str, end: str) -> ToolCall | None:
    """Return the call that ends a completion: the tool's name and its input between marks."""
    before, has_end, _ = text.rpartition(end)
    _, has_start, call = before.rpartition(start)
    if not has_end:
        return None
    name, *rest = call.split(maxsplit=1) or [""]
    return ToolCall(name, "".join(rest)) if has_start else ToolCall("", call)


def tool_result(path: str, text: str, timeout_s: float, max_characters: int) -> str:
    """Return a tool's result, or an error message for the policy.

    A `RewardError` is raised: it is an error of the infrastructure.
    """
    tool = load_function(path, setting="workflow.tools", error=ArealFlowError)
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
    if (num_cut := len(message) - max_characters) > 0:
        return f"{message[:max_characters]} ({num_cut} characters left out)"
    return message


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
        """Return one trajectory, scored by its last completion."""
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
            results = await all_of(self._result(call, context) for call in calls)
            extended = draft.with_environment(self._result_tokens(results, draft, context))
            if context.num_tokens_left(extended.tokens) < 1:
                limit = "generation.max_model_len"
                break
            draft = extended
        score = self._with_calls(await context.score(completion.tokens), num_calls)
        draft = draft.scored(score)
        return [draft.cut_by(limit) if limit else draft]

    def _calls(self, prompt: Tokens, answer: Tokens, context: EpisodeContext) -> list[ToolCall]:
        if context.is_chat:
            return [ToolCall(*call) for call in context.chat_calls(prompt, answer)]
        call = marked_call(context.decode(answer), start=self.call_start, end=self.call_end)
        return [call] if call else []

    def _result_tokens(
        self, results: Sequence[str], draft: TrajectoryDraft, context: EpisodeContext
    ) -> Tokens:
        if context.is_chat:
            return context.tool_turn(*results, after=draft.tokens)
        (result,) = results  # outside a chat there is one call, at the end
        return context.encode(self.result_template.replace("{result}", result))

    async def _result(self, call: ToolCall, context: EpisodeContext) -> str:
        paths = tools_by_name(self.tools)
        if call.name not in paths:
            return f"Error: expected one of the tools {', '.join(paths)}, found {call.name!r}"
        limits = self.timeout_s, self.max_result_characters
        return str(await context.call_tool(CALL_TOOL, paths[call.name], call.text, *limits))

    def _with_calls(self, score: Score, num_calls: int) -> Score:
        """Subtract the cost of calls from a score, and add their number as a part."""
        parts = (*score.parts, RewardPart("tool_calls", float(num_calls)))
        reward = score.reward if score.reward is None else score.reward - self.call_cost * num_calls
        return replace(score, reward=reward, parts=parts)
