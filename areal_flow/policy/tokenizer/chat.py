"""Chat templates: messages as the text that a model was trained to read, and tool calls in answers.

Templates render whole conversations, while a policy's tokens are only ever appended to here. So the
turn after an answer is cut out of a rendered conversation, and a template that changes earlier
answers is refused. Reads no files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from areal_flow.core.digests import sha256_hex
from areal_flow.core.thinking import BEGIN, END

Message = Mapping[str, Any]
"""`role` and `content`; an assistant's calls of tools."""
Tool = Mapping[str, Any]
"""A JSON schema, as chat templates take it."""

PROMPT_END = 16
"""Number of last tokens of a prompt that show whether the policy begins by thinking."""
_REASONING = re.compile(rf"\A(?:(?!{BEGIN}).)*?{END}|{BEGIN}.*?(?:{END}|\Z)", re.DOTALL)
"""Text between think tags; the prompt may begin it, and the end of the answer may end it."""

_ANSWER = "areal-flow's answer"
_TOOL = "areal-flow-tool"
_ANSWERS = (_ANSWER, f"{BEGIN}\nSteps.\n{END}\n\n{_ANSWER}")


@dataclass(frozen=True)
class ChatTemplate:
    source: str
    special_tokens: Mapping[str, str]
    tool_use: str = ""
    """The template of conversations with tools; empty: the same."""

    @property
    def sha256(self) -> str:
        return sha256_hex(self.source + self.tool_use)

    @cached_property
    def _with_tools(self) -> ChatTemplate:
        return replace(self, source=self.tool_use, tool_use="") if self.tool_use else self

    def render(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> str:
        """Return the conversation up to where the policy's answer begins."""
        if tools and self.tool_use:
            return self._with_tools.render(messages, tools=tools)
        from areal_flow.policy.models.huggingface import render_jinja_template

        try:
            (rendered,), _ = render_jinja_template(
                [messages],
                tools=[*tools] or None,
                chat_template=self.source,
                add_generation_prompt=True,
                **self.special_tokens,
            )
        except Exception as error:  # a template is a program of its own
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"the chat template does not render messages of {roles}: {type(error).__name__}: "
                f"{error}"
            ) from error
        return str(rendered)

    def next_turn(self, *contents: str, ended_by: str, role: str = "user") -> str:
        """Return the text between two answers: messages of the user, or of tools."""
        exchange = _message("user", "?"), _message("assistant", _ANSWER)
        messages = [*exchange, *(_message(role, content) for content in contents)]
        template = self._with_tools if role == "tool" else self
        return template.following(messages, 1, ended_by=ended_by)

    def following(
        self, messages: Sequence[Message], at: int, *, ended_by: str, tools: Sequence[Tool] = ()
    ) -> str:
        """Return the text between the answer at index `at` and the next answer.

        `ended_by` is the text of the token that ended the answer, which is not repeated, or empty.
        """
        if rewrites := (self._with_tools if tools else self)._rewrites:
            raise ValueError(rewrites)
        shown = [*messages[:at], _message("assistant", _ANSWER), *messages[at + 1 :]]
        _, _, following = self.render(shown, tools=tools).partition(_ANSWER)
        before, _, rest = following.partition(ended_by) if ended_by else ("?", "", "")
        return following if before.strip() else rest

    def answer(self, messages: Sequence[Message]) -> tuple[str, str]:
        """Return the last message as the policy would write it, and the text after it."""
        before, last = self.render(messages[:-1]), messages[-1]
        content = last["content"].strip()
        _, _, after = self.render([*messages[:-1], _message("assistant", _ANSWER)]).partition(
            _ANSWER
        )
        shown = self.render(messages)
        answer = shown.removeprefix(before).removesuffix(after)
        is_kept = content in answer if last.get("tool_calls") else answer.rstrip().endswith(content)
        if before + answer + after != shown or not is_kept:
            raise ValueError(
                "the chat template rewrites the answer, or what stands before it: expected "
                f"{before[-40:] + content[:40]!r}, found {shown[max(0, len(before) - 40) :]!r:.90}"
            )
        return answer, after

    @cached_property
    def _rewrites(self) -> str:
        """The error if answers change once another message follows, else empty."""
        question = _message("user", "?")
        first = self.render([question])
        for answer in _ANSWERS:
            rendered = self.render(
                [question, _message("assistant", answer), _message("user", "??")]
            )
            if not rendered.removeprefix(first).lstrip().startswith(answer):
                return (
                    "the chat template rewrites earlier answers, and the policy must read what it "
                    f"wrote: expected {first + answer!r} before another message, found {rendered!r}"
                )
        return ""

    @cached_property
    def call_start(self) -> str:
        """The text before the JSON of a tool's call, such as `<tool_call>`."""
        if self.tool_use:
            return self._with_tools.call_start
        first = self.render([_message("user", "?")])
        function = {"name": _TOOL, "arguments": {"input": "?"}}
        calls = [{"type": "function", "function": function}]
        called = {**_message("assistant", ""), "tool_calls": calls}
        shown = self.render([_message("user", "?"), called, _message("user", "??")]).removeprefix(
            first
        )
        start, brace, rest = shown.partition("{")
        prompt = self.render([_message("user", "?")], tools=[tool_schema(_TOOL, "?")])
        if _TOOL not in prompt or _json_call(brace + rest) != (_TOOL, "?"):
            raise ValueError(
                "the chat template does not tell the policy of tools, or does not show their calls "
                "as JSON with name and arguments"
            )
        return start.strip()

    def calls_in(self, answer: str, *, is_thinking: bool = False) -> list[tuple[str, str]]:
        """Return name and input of each call in an answer, both empty for a call that is not JSON.

        Calls within `<think>...</think>` are ignored. `is_thinking`: the prompt ends with
        `<think>`.
        """
        start = self.call_start
        answer = blank_reasoning(answer, has_begun=is_thinking).replace("\0", "")
        if not start:
            return [_json_call(answer.strip())] if answer.lstrip().startswith("{") else []
        return [_json_call(text.lstrip()) for text in answer.split(start)[1:]]


def tool_schema(name: str, description: str) -> Tool:
    parameters = {
        "type": "object",
        "properties": {"input": {"type": "string", "description": description}},
        "required": ["input"],
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _json_call(text: str) -> tuple[str, str]:
    """Return name and input of the call at the start of a text; both empty if there is none."""
    try:
        call, _ = json.JSONDecoder().raw_decode(text)
        (argument,) = arguments_of(call).values() or ("",)
        return str(call["name"]), str(argument)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return "", ""


def arguments_of(call: Mapping[str, Any]) -> Any:
    """Return the arguments of a call, `{}` if there are none.

    Raises:
        ValueError: they are a string that is not JSON.
    """
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str) and arguments:
        return json.loads(arguments)
    return arguments or {}


def blank_reasoning(text: str, *, has_begun: bool = False) -> str:
    """Overwrite reasoning with zero characters, so that nothing in it is taken for an action.

    Args:
        has_begun: whether the prompt ends with the start of reasoning.
    """
    if has_begun:
        return blank_reasoning(BEGIN + text)[len(BEGIN) :]
    return _REASONING.sub(lambda reasoning: "\0" * len(reasoning[0]), text)


def begins_reasoning(prompt_end: str) -> bool:
    """Return whether a prompt with this end has begun the policy's reasoning."""
    return prompt_end.rstrip().endswith(BEGIN)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
