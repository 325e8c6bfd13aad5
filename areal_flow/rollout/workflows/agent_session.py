"""What an agent's calls become: conversations that only ever grow, token by token.

A call whose messages continue an earlier answer of the session is appended to that conversation.
Any other begins a new one, a branch: the agent rewrote its history, the chat template rewrites
earlier answers, or two calls continue one answer. Sampled tokens are never tokenised again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any

from areal_flow.core.errors import ArealFlowError, EngineError, WeightsError
from areal_flow.core.types import Score
from areal_flow.policy.tokenizer.tool_calls import (
    PROMPT_END,
    arguments_of,
    begins_reasoning,
    blank_reasoning,
)
from areal_flow.rollout.workflows.episode import EpisodeContext, Message, TrajectoryDraft

CALL_START = "<tool_call>"
_CALL = re.compile(CALL_START + r"\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class CallRefused(ArealFlowError):
    """A call that gets no completion; `status` is that of HTTP."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Answer:
    message: Message
    finish_reason: str
    num_prompt_tokens: int
    num_completion_tokens: int


@dataclass
class Conversation:
    """One branch: its messages so far, of which the last is an answer, and their tokens."""

    draft: TrajectoryDraft
    tools: Sequence[Message]
    messages: list[Message] = field(default_factory=list)
    num_answers: int = 0
    is_asked: bool = False
    """Whether a call goes on from here at the moment."""
    ended_by: str = ""
    """The limit at which the last call to go on from here was refused."""


class Session:
    """The calls of one member's agent, and its reward."""

    def __init__(self, context: EpisodeContext, *, max_calls: int) -> None:
        self._context = context
        self._max_calls, self._num_calls = max_calls, 0
        self._conversations: list[Conversation] = []
        self.reward: float | None = None
        self.failure: Exception | None = None
        """Why the generator cannot serve: the group will be tried again."""
        self.ended_by = ""
        """The limit at which the episode ended, with all of its conversations."""
        self.limits: dict[int, str] = {}
        """Those at which calls were refused, by the HTTP status of the refusal."""

    def rewarded(self, reward: Any) -> None:
        try:
            number = nan if isinstance(reward, str) else float(reward)
        except (TypeError, ValueError, OverflowError):
            number = nan
        if not isfinite(number):
            raise CallRefused(f"expected a finite number as the reward, found {reward!r:.80}")
        if self.reward is not None:
            raise CallRefused(
                f"this session has its reward already ({self.reward:g}); the first one counts",
                status=409,
                code="reward_exists",
            )
        self.reward = number

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        max_new_tokens: int | None,
        on_text: Callable[[str], None] | None = None,
    ) -> Answer:
        """Have the policy answer; `on_text` gets the beginning of its content as it is sampled."""
        self._num_calls += 1
        if self._num_calls > self._max_calls:
            self.ended_by = self.limits[429] = f"workflow.max_calls ({self._max_calls})"
            raise CallRefused(f"{self.ended_by} calls were made", status=429, code="max_calls")
        messages = [_normal(message) for message in messages]
        conversation, draft = self._asked(messages, tools)
        conversation.is_asked = True
        try:
            completion = await self._context.generate(
                draft.tokens,
                conversation.num_answers,
                branch=draft.branch,
                max_new_tokens=max_new_tokens,
                on_token=on_text and ContentStream(self._context, on_text, has_tools=bool(tools)),
            )
        except (EngineError, WeightsError) as error:
            self.failure = error
            raise
        except ArealFlowError as error:
            conversation.ended_by = self.limits[400] = f"the context: {error}"
            raise CallRefused(str(error), code="context_length_exceeded") from error
        finally:
            conversation.is_asked = False
        conversation.ended_by = ""
        conversation.draft = draft.with_completion(completion)
        decode = self._context.decode
        message = answer_message(
            decode(completion.tokens),
            tools,
            call_number=self._num_calls,
            is_thinking=begins_reasoning(decode(draft.tokens[-PROMPT_END:])),
        )
        conversation.messages = [*messages, _normal(message)]
        conversation.num_answers += 1
        reason = "tool_calls" if message.get("tool_calls") else completion.finish_reason
        return Answer(message, reason, len(draft.tokens), len(completion.tokens))

    def limit_behind(self, error: Exception) -> str:
        """Return the limit whose refusal, by its status of HTTP, caused an error; else empty."""
        statuses = (status for each in _chain(error) for status in _statuses(each))
        return next((self.limits[s] for s in statuses if s in self.limits), "")

    def drafts(self) -> list[tuple[TrajectoryDraft, str]]:
        """Return the conversations that have an answer, each with the limit that ended it."""
        score = None if self.reward is None else Score(self.reward)
        return [
            (c.draft.scored(score) if score else c.draft, self.ended_by or c.ended_by)
            for c in self._conversations
            if c.num_answers
        ]

    def _asked(
        self, messages: Sequence[Message], tools: Sequence[Message]
    ) -> tuple[Conversation, TrajectoryDraft]:
        """Return the conversation of a call, and its tokens up to where the policy answers."""
        for conversation in reversed(self._conversations):
            if tokens := self._following(conversation, messages, tools):
                return conversation, conversation.draft.with_environment(tokens)
        try:
            tokens = self._context.chat(messages, tools)
        except ValueError as error:
            raise CallRefused(str(error)) from error
        begun = TrajectoryDraft(tokens, branch=len(self._conversations))
        self._conversations.append(Conversation(begun, tools))
        return self._conversations[-1], begun

    def _following(
        self, conversation: Conversation, messages: Sequence[Message], tools: Sequence[Message]
    ) -> Any:
        num_known = len(conversation.messages)
        new = messages[num_known:]
        goes_on = (
            not conversation.is_asked
            and conversation.num_answers
            and conversation.tools == tools
            and conversation.messages == messages[:num_known]
            and new
            and all(message["role"] != "assistant" for message in new)
        )
        if not goes_on:
            return None
        draft = conversation.draft
        last = int(draft.output_tokens[-1]) if draft.finish_reason == "stop" else -1
        try:
            return tuple(self._context.chat(messages, tools, after=(num_known - 1, last)).tolist())
        except ValueError:
            return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its causes and those of its group."""
    yield error
    over = error.__cause__ or error.__context__
    for each in (*getattr(error, "exceptions", ()), *([over] if over else [])):
        yield from _chain(each)


def _statuses(error: BaseException) -> list[int]:
    places = (error, getattr(error, "response", None))
    names = ("status_code", "status", "code")
    statuses = (getattr(place, name, None) for place in places for name in names)
    return [status for status in statuses if isinstance(status, int)]


def answer_message(
    text: str, tools: Sequence[Message], *, call_number: int, is_thinking: bool = False
) -> dict[str, Any]:
    """Return an answer as a message; with tools, `<tool_call>{JSON}</tool_call>` are its calls.

    One within `<think>...</think>` is none; `is_thinking` says that the prompt ends with `<think>`.
    """
    calls: list[dict[str, Any]] = []
    content, end = "", 0
    visible = blank_reasoning(text, has_begun=is_thinking)
    for match in _CALL.finditer(visible) if tools else ():
        content, end = content + text[end : match.start()], match.end()
        try:
            call = json.loads(match[1])
            function = {"name": str(call["name"]), "arguments": json.dumps(arguments_of(call))}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        name = f"call_{call_number}_{len(calls)}"
        calls.append({"id": name, "type": "function", "function": function})
    if not calls:
        return {"role": "assistant", "content": text}
    content = (content + text[end:]).rstrip()
    return {"role": "assistant", "content": content or None, "tool_calls": calls}


def _normal(message: Message) -> Message:
    """Return a message as templates take it: arguments of calls parsed, parts of text joined."""
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CallRefused(f"expected a call of a function, found {call!r:.80}") from error


class ContentStream:
    """Takes tokens one by one, and passes on whole characters.

    Where there are tools, neither a call is passed on nor white space that may stand before one.
    """

    def __init__(
        self, context: EpisodeContext, on_text: Callable[[str], None], *, has_tools: bool
    ) -> None:
        self._context, self._on_text, self._has_tools = context, on_text, has_tools
        self._tokens: list[int] = []
        self._num_shown = self._num_read = 0
        """Tokens before the last piece, and with it: text depends on the tokens before."""
        self._held = ""

    def __call__(self, token: int) -> None:
        self._tokens.append(token)
        recent, decode = self._tokens[self._num_shown :], self._context.decode
        before = decode(recent[: self._num_read - self._num_shown])
        text = decode(recent)
        if text.endswith("\N{REPLACEMENT CHARACTER}") or len(text) <= len(before):
            return
        self._num_shown, self._num_read = self._num_read, len(self._tokens)
        self._pass_on(self._held + text[len(before) :])

    def _pass_on(self, text: str) -> None:
        certain = len(text)
        if self._has_tools:
            certain = text.find(CALL_START)
            if certain < 0:
                lengths = range(len(CALL_START), -1, -1)
                certain = len(text) - next(n for n in lengths if text.endswith(CALL_START[:n]))
            certain = len(text[:certain].rstrip())
        self._held = text[certain:]
        if certain:
            self._on_text(text[:certain])
