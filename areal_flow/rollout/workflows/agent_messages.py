"""Messages of agents: answers as OpenAI's SDKs read them, and messages as chat templates do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_flow.core.errors import ArealFlowError
from areal_flow.policy.tokenizer.chat import Message, arguments_of, blank_reasoning

Decode = Callable[[Sequence[int]], str]

CALL_START = "<tool_call>"
_CALL = re.compile(CALL_START + r"\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_NO_CALL = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of reading what is not a call; the last one if it is nested too deeply."""


class CallRefused(ArealFlowError):
    """A call that gets no completion but an HTTP status."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def answer_message(
    text: str, tools: Sequence[Message], *, call_number: int, is_thinking: bool = False
) -> dict[str, Any]:
    """Return an answer as a message; with tools, each `<tool_call>{JSON}</tool_call>` is a call.

    Reasoning within `<think>...</think>` holds no calls; with `is_thinking` the prompt has opened
    the tag.
    """
    calls: list[dict[str, Any]] = []
    content, end = "", 0
    visible = blank_reasoning(text, has_begun=is_thinking)
    for match in _CALL.finditer(visible) if tools else ():
        content, end = content + text[end : match.start()], match.end()
        try:
            call = json.loads(match[1])
            function = {"name": str(call["name"]), "arguments": json.dumps(arguments_of(call))}
        except _NO_CALL:
            continue
        name = f"call_{call_number}_{len(calls)}"
        calls.append({"id": name, "type": "function", "function": function})
    if not calls:
        return {"role": "assistant", "content": text}
    content = (content + text[end:]).rstrip()
    return {"role": "assistant", "content": content or None, "tool_calls": calls}


def normal_message(message: Message) -> Message:
    """Return a message as chat templates expect it: arguments parsed, parts of text joined."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise CallRefused(f"expected messages with role and content, found {message!r:.80}")
    content = message.get("content") or ""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
            raise CallRefused("expected text as content: nothing else becomes tokens here")
        content = "".join(map(str, texts))
    normal: dict[str, Any] = {"role": message["role"], "content": content}
    normal |= {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
    if calls := message.get("tool_calls"):
        normal["tool_calls"] = [_normal_call(call) for call in calls]
    return normal


def _normal_call(call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        named = {"name": function["name"], "arguments": arguments_of(function)}
        return {"id": call.get("id"), "type": "function", "function": named}
    except _NO_CALL as error:
        raise CallRefused(f"expected a call of a function, found {call!r:.80}") from error


class TokenTexts:
    """Splits text by tokens; a character of several tokens belongs to the last of them."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._num_shown = self._num_read = 0
        """Number of tokens before the last piece, and with it: text depends on earlier tokens."""

    def text_of(self, token: int) -> str:
        self._tokens.append(token)
        recent = self._tokens[self._num_shown :]
        before = self._decode(recent[: self._num_read - self._num_shown])
        text = self._decode(recent)
        if text.endswith("\N{REPLACEMENT CHARACTER}") or len(text) <= len(before):
            return ""
        self._num_shown, self._num_read = self._num_read, len(self._tokens)
        return text[len(before) :]


class ContentStream:
    """Receives tokens one by one, and passes on complete characters.

    It stops before a stop string. With tools it passes on neither calls nor the white space before
    them.
    """

    def __init__(
        self,
        decode: Decode,
        on_text: Callable[[str], None],
        *,
        has_tools: bool,
        stop: Sequence[str] = (),
    ) -> None:
        self._texts, self._on_text, self._has_tools = TokenTexts(decode), on_text, has_tools
        self._marks = [*stop, *([CALL_START] if has_tools else [])]
        self._held = ""

    def __call__(self, token: int) -> None:
        text = self._held + self._texts.text_of(token)
        certain = min((_start_of(mark, text) for mark in self._marks), default=len(text))
        if self._has_tools:
            certain = len(text[:certain].rstrip())
        self._held = text[certain:]
        if certain:
            self._on_text(text[:certain])


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first of some stop strings."""
    return text[: min((place for each in stop if (place := text.find(each)) >= 0), default=None)]


def _start_of(mark: str, text: str) -> int:
    """Return where a text has a mark or, at its end, the beginning of one; else its length."""
    if (place := text.find(mark)) >= 0:
        return place
    return len(text) - next(n for n in range(len(mark), -1, -1) if text.endswith(mark[:n]))
