"""The policy calls tools, whose results are appended as tokens of the environment.

A call is `<tool>NAME INPUT</tool>`, which ends the completion; in a chat, it has the format of the
chat template. A tool is a function that runs on a reward worker, or runs text in the episode's
sandbox, whose shell and interpreter go on where the last call ended. Its result, or an error
message, is context, which the loss mask leaves out. The rewards judge the last completion.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from inspect import Parameter
from itertools import count
from time import monotonic
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from areal_flow.core.concurrency import all_of
from areal_flow.core.errors import ArealFlowError, RewardError
from areal_flow.core.failures import in_own_thread
from areal_flow.core.settings import require
from areal_flow.core.types import Prompt, RewardPart, Score, Tokens, ToolRecord
from areal_flow.policy.tokenizer.chat import INPUT, Tool, ToolCall, tool_schema
from areal_flow.rewards.shipping import function_name, load_function
from areal_flow.rollout.workflows.episode import (
    EpisodeContext,
    TimedWorkflow,
    TrajectoryDraft,
)
from areal_flow.rollout.workflows.sandbox_tools import (
    EDIT,
    EDIT_SCHEMA,
    INTERPRETERS,
    SANDBOX_TOOLS,
    EpisodeSandbox,
)
from areal_flow.sandboxes.protocol import CommandResult
from areal_flow.sandboxes.registry import NO_SANDBOX, SandboxSettings

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
        if tool not in {*TOOLS, *SANDBOX_TOOLS} and ":" not in tool:
            raise ValueError(
                f"workflow.tools: expected one of {', '.join({**TOOLS, **INTERPRETERS})}, {EDIT}, "
                f"or an import path such as 'my_package.my_module:my_tool', found {tool!r}"
            )
        name = function_name(tool)
        if name in tools:
            raise ValueError(f"workflow.tools: two tools are called {name!r}")
        tools[name] = TOOLS.get(tool, tool)
    return tools


def marked_call(text: str, *, start: str, end: str) -> ToolCall | None:
    """Return the call that ends a completion: the tool's name and its input between marks."""
    before, has_end, _ = text.rpartition(end)
    _, has_start, call = before.rpartition(start)
    if not has_end:
        return None
    name, *rest = call.split(maxsplit=1) or [""]
    return ToolCall(name, {INPUT: "".join(rest)}) if has_start else ToolCall("", {INPUT: call})


def takes_text(tool: Callable[..., Any]) -> bool:
    """Return whether a tool has one parameter, a text, which a call need not name as it does."""
    parameters = [*inspect.signature(tool).parameters.values()]
    return len(parameters) == 1 and parameters[0].annotation in (str, "str", Parameter.empty)


def text_of(arguments: Mapping[str, Any]) -> str:
    """Return the only argument of a call as text.

    Raises:
        ValueError: there are several.
    """
    if len(arguments) > 1:
        raise ValueError(f"expected one argument, found {', '.join(arguments)}")
    return "".join(map(str, arguments.values()))


def by_name(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name: outside a chat they are JSON in a text.

    Raises:
        ValueError: the text is not a JSON object.
    """
    named = json.loads(text_of(arguments)) if arguments.keys() == {INPUT} else arguments
    if not isinstance(named, Mapping):
        raise ValueError(f"expected a JSON object of arguments, found {named!r:.80}")
    return dict(named)


def given_to(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> list[str] | dict[str, Any]:
    """Return a call's arguments as a tool takes them, by place or by name."""
    if takes_text(tool):
        return [text_of(arguments)]
    has_input = INPUT in inspect.signature(tool).parameters
    return dict(arguments) if has_input else by_name(arguments)


def _call(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    given = given_to(tool, arguments)
    return str(tool(*given) if isinstance(given, list) else tool(**given))


def tool_result(
    path: str, arguments: Mapping[str, Any], timeout_s: float, max_characters: int
) -> str:
    """Return a tool's result, or an error message for the policy.

    A `RewardError` is raised: it is an error of the infrastructure.
    """
    tool = load_function(path, setting="workflow.tools", error=ArealFlowError)
    call = in_own_thread(partial(_call, tool, arguments), name="tool")
    wait([call], timeout_s)
    if not call.done():
        message = f"Error: no result within {timeout_s:g} s"
    elif error := call.exception():
        if isinstance(error, RewardError):
            raise error
        message = f"Error: {type(error).__name__}: {error}"
    else:
        message = call.result()
    return shortened(message, max_characters)


def shortened(message: str, max_characters: int) -> str:
    """Return a tool's result as the policy reads it."""
    message = message.encode(errors="replace").decode()  # a lone surrogate has no tokens
    if (num_cut := len(message) - max_characters) > 0:
        return f"{message[:max_characters]} ({num_cut} characters left out)"
    return message


class WithTools(TimedWorkflow):
    """One conversation with tools, up to `max_calls` calls."""

    tools: tuple[str, ...] = Field(("calculator",), min_length=1, strict=False)
    """`calculator`, `python` (in a sandbox), `bash` and `edit` (need `sandbox`), or the import path
    of a function of a text, or of arguments that its annotations and docstring describe."""
    sandbox: SandboxSettings = SandboxSettings(provider=NO_SANDBOX)
    """The sandbox of each episode, in which the calls of `bash`, `python` and `edit` share a shell,
    an interpreter and files; without it, each call of `python` has its own."""
    functions_in_sandbox: bool = False
    """Run functions of your own in the episode's sandbox, by the source of their module, instead of
    on the reward worker; they can import what is installed in it."""
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

    @model_validator(mode="after")
    def _has_a_sandbox(self) -> Self:
        needing = [name for name in ("bash", EDIT) if name in self.tools]
        needing += ["functions_in_sandbox"] * self.functions_in_sandbox
        require(
            not needing or self.has_sandbox,
            f"workflow.tools: {', '.join(needing)} needs a workflow.sandbox.provider",
        )
        return self

    @property
    def has_sandbox(self) -> bool:
        return self.sandbox.provider != NO_SANDBOX

    def schema_in_sandbox(self, name: str) -> Tool | None:
        """Return the schema of a tool that is not a function but a part of the sandbox."""
        if not self.has_sandbox or name not in SANDBOX_TOOLS:
            return None
        return EDIT_SCHEMA if name == EDIT else tool_schema(name, INTERPRETERS[name])

    async def episode(
        self,
        prompt: Prompt,
        context: EpisodeContext,
        sandbox: EpisodeSandbox,
        judge: Callable[[Tokens], Awaitable[Score]],
    ) -> TrajectoryDraft:
        """Return the conversation, scored by `judge`, which gets its last completion."""
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
            records = await all_of(self._record(call, turn, context, sandbox) for call in calls)
            draft = draft.with_calls(records)
            results = [record.result for record in records]
            extended = draft.with_environment(self._result_tokens(results, draft, context))
            if context.num_tokens_left(extended.tokens) < 1:
                limit = "generation.max_model_len"
                break
            draft = extended
        score = self._with_calls(await judge(completion.tokens), num_calls)
        draft = draft.scored(score)
        return draft.cut_by(limit) if limit else draft

    def _calls(self, prompt: Tokens, answer: Tokens, context: EpisodeContext) -> list[ToolCall]:
        if context.is_chat:
            return [*context.chat_calls(prompt, answer)]
        call = marked_call(context.decode(answer), start=self.call_start, end=self.call_end)
        return [call] if call else []

    def _result_tokens(
        self, results: Sequence[str], draft: TrajectoryDraft, context: EpisodeContext
    ) -> Tokens:
        if context.is_chat:
            return context.tool_turn(*results, after=draft.tokens)
        (result,) = results  # outside a chat there is one call, at the end
        return context.encode(self.result_template.replace("{result}", result))

    async def _record(
        self, call: ToolCall, turn: int, context: EpisodeContext, sandbox: EpisodeSandbox
    ) -> ToolRecord:
        """Call a tool; a command's seconds are its own, another's include the way there."""
        began, ran = monotonic(), None
        if self.has_sandbox and self._is_in_sandbox(call.name):
            try:
                ran = await self._in_sandbox(call, sandbox)
            except (FileNotFoundError, RecursionError, TypeError, ValueError) as error:
                ran = f"Error: {error}"
        result = await self._result(call, context) if ran is None else self._shown(ran)
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        arguments = arguments.encode(errors="replace").decode()
        if isinstance(ran, CommandResult):
            return ToolRecord(turn, call.name, arguments, result, ran.exit_code, ran.duration_s)
        return ToolRecord(turn, call.name, arguments, result, None, monotonic() - began)

    def _is_in_sandbox(self, name: str) -> bool:
        path = tools_by_name(self.tools).get(name, "")
        is_own = path not in {"", *TOOLS.values(), *SANDBOX_TOOLS}
        return (name in SANDBOX_TOOLS and path != "") or (is_own and self.functions_in_sandbox)

    async def _in_sandbox(self, call: ToolCall, sandbox: EpisodeSandbox) -> CommandResult | str:
        """Raise a ValueError, TypeError or FileNotFoundError for a bad call."""
        if call.name == EDIT:
            return await sandbox.edit(**{k: str(v) for k, v in by_name(call.arguments).items()})
        if call.name in INTERPRETERS:
            return await sandbox.run(text_of(call.arguments), self.timeout_s, call.name)
        path = tools_by_name(self.tools)[call.name]
        function = load_function(path, setting="workflow.tools", error=ArealFlowError)
        return await sandbox.call(path, given_to(function, call.arguments), self.timeout_s)

    def _shown(self, ran: CommandResult | str) -> str:
        """Return what ran in the sandbox as the policy reads it."""
        if isinstance(ran, str):
            return shortened(ran, self.max_result_characters)
        failure = f"Error: exit code {ran.exit_code}" if ran.exit_code else ""
        if ran.timed_out:
            failure = f"Error: no result within {self.timeout_s:g} s"
        return shortened(f"{ran.output.rstrip()}\n{failure}".strip(), self.max_result_characters)

    async def _result(self, call: ToolCall, context: EpisodeContext) -> str:
        paths = tools_by_name(self.tools)
        if call.name not in paths:
            return f"Error: expected one of the tools {', '.join(paths)}, found {call.name!r}"
        limits = self.timeout_s, self.max_result_characters
        return str(await context.call_tool(CALL_TOOL, paths[call.name], call.arguments, *limits))

    def _with_calls(self, score: Score, num_calls: int) -> Score:
        """Subtract the cost of calls from a score, and add their number as a part."""
        parts = (*score.parts, RewardPart("tool_calls", float(num_calls)))
        reward = score.reward if score.reward is None else score.reward - self.call_cost * num_calls
        return replace(score, reward=reward, parts=parts)


class ToolUse(WithTools):
    """A conversation with tools, whose last completion the rewards judge."""

    name: Literal["tool_use"] = "tool_use"
    """What an episode is; each workflow has its own settings."""

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        """Return one trajectory, scored by its last completion."""
        async with EpisodeSandbox(self.sandbox, context, prompt) as sandbox:
            return [await self.episode(prompt, context, sandbox, context.score)]
