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
from areal_flow.core.errors import ModelError
from areal_flow.core.thinking import BEGIN, END

Message = Mapping[str, Any]
"""`role` and `content`; an assistant's calls of tools."""
Tool = Mapping[str, Any]
"""A JSON schema, as chat templates take it."""

INPUT = "input"
"""The argument of a tool that takes a text."""
PROMPT_END = 16
"""Number of last tokens of a prompt that show whether the policy begins by thinking."""
TAIL_CHARACTERS = 40
"""Characters before an answer that tell where it stands, if its last message has no content."""
_REASONING = re.compile(rf"\A(?:(?!{BEGIN}).)*?{END}|{BEGIN}.*?(?:{END}|\Z)", re.DOTALL)
"""Text between think tags; the prompt may begin it, and the end of the answer may end it."""

_ANSWER = "areal-flow's answer"
_TOOL = "areal-flow-tool"
_ANSWERS = (_ANSWER, f"{BEGIN}\nSteps.\n{END}\n\n{_ANSWER}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool's name, empty if the call is malformed, and its arguments by name."""

    name: str
    arguments: Mapping[str, Any]


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

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the conversation, by default up to where the policy's answer begins."""
        if tools and self.tool_use:
            return self._with_tools.render(
                messages, tools=tools, add_generation_prompt=add_generation_prompt
            )
        from areal_flow.policy.models.huggingface import render_jinja_template

        try:
            (rendered,), _ = render_jinja_template(
                [messages],
                tools=[*tools] or None,
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
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

    def answers(
        self,
        messages: Sequence[Message],
        first: int,
        *,
        stop_texts: Sequence[str],
        tools: Sequence[Tool] = (),
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return a conversation that ends with an answer, and where its answers begin and end.

        An answer is all that the policy writes: reasoning, content, calls of tools, and the text of
        a stop token after them. It is found by the conversations that end before and after it, and
        stands in this one after the same message. Templates may put tools elsewhere once another
        message follows, but must not change an answer.

        Args:
            messages: the conversation.
            first: the index from which on answers are the policy's.
            stop_texts: the texts of tokens that may end an answer.
            tools: what the template shows to the policy.

        Raises:
            ValueError: the template changes or omits an answer, a call, a result or the tools.
        """
        text = self.render(messages, tools=tools, add_generation_prompt=False)
        spans, end, results = list[tuple[int, int]](), 0, list[Message]()
        for index, message in enumerate(messages):
            if message["role"] == "tool":
                results.append(message)
            if message["role"] != "assistant" or index < first:
                continue
            before = self.render(messages[:index], tools=tools)
            if not spans:
                self._check_tools(messages[:index], tools, before)
            shown = self.render(messages[: index + 1], tools=tools, add_generation_prompt=False)
            answer = _without_rest(shown.removeprefix(before), stop_texts)
            _check_answer(message, before, shown, answer, stop_texts)
            start = len(before)
            if not text.startswith(before + answer):
                tail = _tail(before, messages[index - 1])
                place = text.find(tail + answer, max(0, end - len(tail)))
                start = place + len(tail) if place >= 0 else -1
            if start < end:
                raise ValueError(
                    "the chat template rewrites earlier answers, and the policy must read what it "
                    f"wrote: expected {answer!r:.90} before other messages, found {text!r:.200}"
                )
            _check_results(results, text[end:start])
            results, end = [], start + len(answer)
            spans.append((start, end))
        return text, spans

    def _check_tools(
        self, messages: Sequence[Message], tools: Sequence[Tool], rendered: str
    ) -> None:
        names = [str(tool.get("function", tool).get("name")) for tool in tools]
        hidden = [name for name in names if name not in rendered]
        if hidden or (tools and rendered == self.render(messages)):
            raise ModelError(
                f"the chat template {self.sha256[:12]} does not tell the policy of the tools "
                f"{', '.join(hidden or names)}: give the model one that does, or leave the rows' "
                "tools out"
            )

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
        function = {"name": _TOOL, "arguments": {INPUT: "?"}}
        calls = [{"type": "function", "function": function}]
        called = {**_message("assistant", ""), "tool_calls": calls}
        shown = self.render([_message("user", "?"), called, _message("user", "??")]).removeprefix(
            first
        )
        start, brace, rest = shown.partition("{")
        prompt = self.render([_message("user", "?")], tools=[tool_schema(_TOOL, "?")])
        if _TOOL not in prompt or _json_call(brace + rest) != ToolCall(_TOOL, {INPUT: "?"}):
            raise ValueError(
                "the chat template does not tell the policy of tools, or does not show their calls "
                "as JSON with name and arguments"
            )
        return start.strip()

    def calls_in(self, answer: str, *, is_thinking: bool = False) -> list[ToolCall]:
        """Return each call in an answer, empty where it is not JSON with a name and arguments.

        Calls within `<think>...</think>` are ignored. `is_thinking`: the prompt ends with
        `<think>`.
        """
        start = self.call_start
        answer = blank_reasoning(answer, has_begun=is_thinking).replace("\0", "")
        if not start:
            return [_json_call(answer.strip())] if answer.lstrip().startswith("{") else []
        return [_json_call(text.lstrip()) for text in answer.split(start)[1:]]


def _tail(rendered: str, message: Message) -> str:
    """Return the end of a conversation from the content of its last message, or a part of that."""
    content = message["content"].strip()
    place = rendered.rfind(content) if content else -1
    return rendered[place if place >= 0 else -TAIL_CHARACTERS :]


def _without_rest(shown: str, stop_texts: Sequence[str]) -> str:
    """Return an answer up to the text of the token that ends it; without one, up to its end."""
    ends = [shown.rfind(text) + len(text) for text in stop_texts if text and text in shown]
    return shown[: max(ends)] if ends else shown.rstrip()


def _check_answer(
    message: Message, before: str, shown: str, answer: str, stop_texts: Sequence[str]
) -> None:
    content, calls = message["content"].strip(), message.get("tool_calls") or ()
    stop = next((text for text in stop_texts if text and answer.endswith(text)), "")
    is_kept = content in answer if calls else answer.removesuffix(stop).rstrip().endswith(content)
    if not shown.startswith(before) or not is_kept:
        raise ValueError(
            "the chat template rewrites the answer, or what stands before it: expected "
            f"{before[-40:] + content[:40]!r}, found {shown[max(0, len(before) - 40) :]!r:.90}"
        )
    for call in calls:
        if (name := str(call.get("function", call).get("name"))) not in answer:
            raise ValueError(f"the chat template does not show the call of {name}: {answer!r:.90}")


def _check_results(results: Sequence[Message], text: str) -> None:
    for result in results:
        content = result["content"].strip()
        as_json = (json.dumps(content, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False))
        if not any(each in text for each in (content, *as_json)):
            raise ValueError(f"the chat template does not show the tool's result {content!r:.60}")


def tool_schema(name: str, description: str) -> Tool:
    """Return the schema of a tool that takes a text."""
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": description}},
        "required": [INPUT],
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _json_call(text: str) -> ToolCall:
    """Return the call at the start of a text; empty if there is none."""
    try:
        call, _ = json.JSONDecoder().raw_decode(text)
        return ToolCall(str(call["name"]), dict(arguments_of(call)))
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return ToolCall("", {})


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
