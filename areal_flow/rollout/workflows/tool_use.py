"""The policy calls tools, whose results are appended as tokens of the environment.

A call is `<tool>NAME INPUT</tool>`, which ends the completion; in a chat, it has the format of the
chat template. A tool is a function that runs on a reward worker, or runs text in the episode's
sandbox, whose shell and interpreter go on where the last call ended. Its result, or an error
message, is context, which the loss mask leaves out. The rewards judge the last completion.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from inspect import Parameter
from itertools import count
from time import monotonic
from typing import Any, Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from areal_flow.core.concurrency import all_of
from areal_flow.core.errors import ArealFlowError, PromptError, RewardError
from areal_flow.core.failures import in_own_thread
from areal_flow.core.settings import require
from areal_flow.core.types import Prompt, RewardPart, Score, Tokens, ToolRecord
from areal_flow.policy.tokenizer.chat import INPUT, ToolCall
from areal_flow.rewards.shipping import function_name, load_function
from areal_flow.rollout.workflows.episode import (
    EpisodeContext,
    TimedWorkflow,
    TrajectoryDraft,
)
from areal_flow.sandboxes.protocol import CommandResult, Interpreter, Sandbox
from areal_flow.sandboxes.registry import NO_SANDBOX, SandboxSettings

TOOLS: dict[str, str] = {
    "calculator": "areal_flow.rollout.tools:calculate",
    "python": "areal_flow.rollout.tools:run_python",
}
INTERPRETERS: Mapping[str, str] = {
    "bash": "Run a bash command; the working directory, variables and files stay for the next one.",
    "python": "Run Python code and print the value of its last line; names stay for the next call.",
}
"""Descriptions of the tools that run in the episode's sandbox, if it has one."""
FILES = "files"
"""The column of prompts with the files of the sandbox: text by path, or the same as JSON."""
CALL_TOOL = f"{__name__}:tool_result"
"""Runs on a reward worker, and calls the tool there."""


def tools_by_name(names: tuple[str, ...]) -> dict[str, str]:
    """Return the import path of each tool by the name of its function."""
    tools: dict[str, str] = {}
    for tool in names:
        if tool not in TOOLS.keys() | INTERPRETERS.keys() and ":" not in tool:
            raise ValueError(
                f"workflow.tools: expected bash, {', '.join(TOOLS)} or an import path such as "
                f"'my_package.my_module:my_tool', found {tool!r}"
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


def _call(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Call a tool; outside a chat its arguments are JSON in a text."""
    if takes_text(tool):
        return str(tool(text_of(arguments)))
    if arguments.keys() == {INPUT} and INPUT not in inspect.signature(tool).parameters:
        arguments = json.loads(text_of(arguments))
    return str(tool(**arguments))


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


class EpisodeSandbox:
    """The sandbox of an episode, started for its first call, with the files of its prompt."""

    def __init__(
        self,
        settings: SandboxSettings,
        context: EpisodeContext,
        prompt: Prompt,
        stack: AsyncExitStack,
    ) -> None:
        self._settings, self._context, self._prompt, self._stack = settings, context, prompt, stack
        self._starting = asyncio.Lock()
        self._sandbox: Sandbox | None = None

    async def run(self, command: str, timeout_s: float, interpreter: str) -> CommandResult:
        async with self._starting:
            if self._sandbox is None:
                self._sandbox = await self._started()
        return await self._sandbox.run(
            command, timeout_s=timeout_s, interpreter=cast("Interpreter", interpreter)
        )

    async def _started(self) -> Sandbox:
        sandbox = await self._stack.enter_async_context(self._context.sandbox(self._settings))
        for path, text in files_of(self._prompt).items():
            await sandbox.write_file(path, text.encode())
        return sandbox


def files_of(prompt: Prompt) -> Mapping[str, str]:
    """Return the files that a prompt's sandbox starts with.

    Raises:
        PromptError: its column `files` is something else.
    """
    files = prompt.metadata.get(FILES) or {}
    if isinstance(files, str):
        try:
            files = json.loads(files)
        except ValueError:
            files = None
    if not isinstance(files, Mapping) or not all(isinstance(t, str) for t in files.values()):
        raise PromptError(
            f"prompt {prompt.prompt_id}: expected in column {FILES!r} text by path, or JSON of it"
        )
    return files


class ToolUse(TimedWorkflow):
    """One conversation with tools, up to `max_calls` calls."""

    name: Literal["tool_use"] = "tool_use"
    """What an episode is; each workflow has its own settings."""
    tools: tuple[str, ...] = Field(("calculator",), min_length=1, strict=False)
    """`calculator`, `python` (in a sandbox), `bash` (needs `sandbox`), or the import path of a
    function of a text, or of arguments that its annotations and docstring describe."""
    sandbox: SandboxSettings = SandboxSettings(provider=NO_SANDBOX)
    """The sandbox of each episode, in which the calls of `bash` and `python` share a shell, an
    interpreter and files; without it, each call of `python` has its own."""
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
        has_bash = "bash" in self.tools
        require(
            not has_bash or self.has_sandbox, "the tool 'bash' needs a workflow.sandbox.provider"
        )
        return self

    @property
    def has_sandbox(self) -> bool:
        return self.sandbox.provider != NO_SANDBOX

    @property
    def sandbox_tools(self) -> Mapping[str, str]:
        """The descriptions of the tools that run in the episode's sandbox, by name."""
        names = self.tools if self.has_sandbox else ()
        return {name: INTERPRETERS[name] for name in names if name in INTERPRETERS}

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        """Return one trajectory, scored by its last completion."""
        async with AsyncExitStack() as stack:
            sandbox = None
            if self.has_sandbox:
                sandbox = EpisodeSandbox(self.sandbox, context, prompt, stack)
            return [await self._episode(prompt, context, sandbox)]

    async def _episode(
        self, prompt: Prompt, context: EpisodeContext, sandbox: EpisodeSandbox | None
    ) -> TrajectoryDraft:
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
        score = self._with_calls(await context.score(completion.tokens), num_calls)
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
        self, call: ToolCall, turn: int, context: EpisodeContext, sandbox: EpisodeSandbox | None
    ) -> ToolRecord:
        """Call a tool; a command's seconds are its own, a function's include the way there."""
        began, exit_code = monotonic(), None
        if sandbox and call.name in self.sandbox_tools:
            result, exit_code, duration_s = await self._run(call, sandbox)
        else:
            result = await self._result(call, context)
            duration_s = monotonic() - began
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        arguments = arguments.encode(errors="replace").decode()
        return ToolRecord(turn, call.name, arguments, result, exit_code, duration_s)

    async def _run(self, call: ToolCall, sandbox: EpisodeSandbox) -> tuple[str, int | None, float]:
        try:
            command = text_of(call.arguments)
        except ValueError as error:
            return f"Error: {error}", None, 0.0
        result = await sandbox.run(command, self.timeout_s, call.name)
        failure = f"Error: exit code {result.exit_code}" if result.exit_code else ""
        if result.timed_out:
            failure = f"Error: no result within {self.timeout_s:g} s"
        shown = f"{result.output.rstrip()}\n{failure}".strip()
        shown = shortened(shown, self.max_result_characters)
        return shown, result.exit_code, result.duration_s

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
