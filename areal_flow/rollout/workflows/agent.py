"""An episode that runs a user's agent, written against any OpenAI SDK.

The agent is a function that gets a `base_url` and an `api_key`, served by `agent_endpoint`. Its
calls become conversations, to which tokens are only ever appended: a call whose messages continue
an earlier answer extends that conversation. Any other starts a new one, a branch: the agent rewrote
its history, the chat template rewrites earlier answers, or two calls continue one answer. Sampled
tokens are never tokenised again.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, nan
from typing import Any, Literal

from pydantic import Field, FiniteFloat

from areal_flow.core.errors import ArealFlowError, ConfigError, EngineError, WeightsError
from areal_flow.core.failures import in_own_thread
from areal_flow.core.types import Prompt, Score
from areal_flow.policy.tokenizer.chat import (
    PROMPT_END,
    Message,
    arguments_of,
    begins_reasoning,
    blank_reasoning,
)
from areal_flow.rewards.shipping import function_name, load_function
from areal_flow.rollout.workflows.episode import EpisodeContext, TimedWorkflow, TrajectoryDraft

CALL_START = "<tool_call>"
_CALL = re.compile(CALL_START + r"\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class Agent(TimedWorkflow):
    """Runs an agent against the policy; its conversations are trained with its reward."""

    name: Literal["agent"] = "agent"
    """What an episode is; each workflow has its own settings."""
    path: str
    """`package.module:function`, `async` or not. It may take `base_url`, `api_key`, `prompt`,
    `answer`, `metadata` and columns of the row, and returns a reward, or None if it posts one."""
    max_calls: int = Field(16, ge=1)
    """Calls of an episode; more are refused, and its trajectories count as cut."""
    missing_reward: Literal["discard", "score"] | FiniteFloat = "discard"
    """Conversations without a reward are discarded, scored by the recipe's rewards, or get this
    number."""

    @property
    def gives_rewards(self) -> bool:
        return self.missing_reward != "score"

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        """Return a trajectory for each conversation of the agent.

        An agent that ends because it used up its calls, seconds or context has not failed: its
        conversations are truncated. If it continues after one context was full, only that one is.
        """
        # Imported here: only agents need an HTTP server.
        from areal_flow.rollout.workflows.agent_endpoint import serving

        agent = load_function(self.path, setting="workflow.path", error=ConfigError)
        session = Session(context, max_calls=self.max_calls)
        limit = asyncio.timeout(self.episode_timeout_s)
        reward = None
        try:
            async with serving(session) as (base_url, api_key), limit:
                reward = await _call(agent, prompt, base_url=base_url, api_key=api_key)
        except Exception as error:
            if session.failure is not None:
                raise session.failure from error
            if isinstance(error, TimeoutError) and limit.expired():
                session.ended_by = f"workflow.episode_timeout_s ({self.episode_timeout_s:g})"
            elif exceeded := session.limit_behind(error):
                session.ended_by = exceeded
            else:
                raise
        if reward is not None and session.reward is None:
            session.set_reward(reward)
        drafts = [await self._finished(*each, context) for each in session.drafts()]
        if not drafts:
            limits = session.ended_by or ", ".join(session.limits.values())
            raise ArealFlowError(
                f"the agent {function_name(self.path)} had no answer from its base_url"
                + (f": ended by {limits}" if limits else "")
            )
        return drafts

    async def _finished(
        self, draft: TrajectoryDraft, limit: str, context: EpisodeContext
    ) -> TrajectoryDraft:
        score, missing = draft.score, self.missing_reward
        if score is None and missing == "discard":
            by = f" before it was ended by {limit}" if limit else ""
            advice = "return or post one, or set workflow.missing_reward"
            score = Score(None, "no_reward", error=f"the agent gave no reward{by}: {advice}")
        elif score is None and not isinstance(missing, str):
            score = Score(missing)
        elif score is None and limit:  # else no message would name the limit
            score = await context.score(draft.output_tokens)
        draft = draft.scored(score) if score else draft
        return draft.cut_by(limit) if limit else draft


async def _call(agent: Any, prompt: Prompt, **served: str) -> Any:
    """Call an agent with the arguments that it names; in its own thread unless it is `async`."""
    arguments = {**prompt.metadata, **served, "prompt": prompt.text, "answer": prompt.answer}
    arguments["metadata"] = dict(prompt.metadata)
    parameters = inspect.signature(agent).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        arguments = {p.name: arguments[p.name] for p in parameters if p.name in arguments}
    try:
        if any(map(inspect.iscoroutinefunction, (agent, agent.__call__))):
            return await agent(**arguments)
        # Not in the event loop's own threads, which are few and load weights.
        return await asyncio.wrap_future(in_own_thread(partial(agent, **arguments), name="agent"))
    except SystemExit as exit_:  # which would end the generator
        raise ArealFlowError(
            f"the agent called sys.exit({exit_.code!r}): it must return a reward"
        ) from exit_


class CallRefused(ArealFlowError):
    """A call that gets no completion but an HTTP status."""

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
    """One branch: its messages so far, the last of them an answer, and their tokens."""

    draft: TrajectoryDraft
    tools: Sequence[Message]
    messages: list[Message] = field(default_factory=list)
    num_answers: int = 0
    is_busy: bool = False
    """Whether a call that continues it is in progress."""
    ended_by: str = ""
    """The limit at which the last call that continues it was refused."""


class Session:
    """The calls of one member's agent, and its reward."""

    def __init__(self, context: EpisodeContext, *, max_calls: int) -> None:
        self._context = context
        self._max_calls, self._num_calls = max_calls, 0
        self._conversations: list[Conversation] = []
        self.reward: float | None = None
        self.failure: Exception | None = None
        """Why the generator cannot serve; the group is retried."""
        self.ended_by = ""
        """The limit that ended the episode with all of its conversations."""
        self.limits: dict[int, str] = {}
        """Limits at which calls were refused, by HTTP status."""

    def set_reward(self, reward: Any) -> None:
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
        conversation, draft = self._conversation_of(messages, tools)
        conversation.is_busy = True
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
            conversation.is_busy = False
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
        """Return the limit whose refusal (an HTTP status) caused an error; empty if none did."""
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

    def _conversation_of(
        self, messages: Sequence[Message], tools: Sequence[Message]
    ) -> tuple[Conversation, TrajectoryDraft]:
        """Return the conversation that a call continues or starts, and its tokens so far."""
        for conversation in reversed(self._conversations):
            if tokens := self._new_tokens(conversation, messages, tools):
                return conversation, conversation.draft.with_environment(tokens)
        try:
            tokens = self._context.chat(messages, tools)
        except ValueError as error:
            raise CallRefused(str(error)) from error
        draft = TrajectoryDraft(tokens, branch=len(self._conversations))
        self._conversations.append(Conversation(draft, tools))
        return self._conversations[-1], draft

    def _new_tokens(
        self, conversation: Conversation, messages: Sequence[Message], tools: Sequence[Message]
    ) -> Any:
        """Return the tokens of new messages; None unless they continue a conversation."""
        num_earlier = len(conversation.messages)
        new = messages[num_earlier:]
        is_continued = (
            not conversation.is_busy
            and conversation.num_answers
            and conversation.tools == tools
            and conversation.messages == messages[:num_earlier]
            and new
            and all(message["role"] != "assistant" for message in new)
        )
        if not is_continued:
            return None
        draft = conversation.draft
        last = int(draft.output_tokens[-1]) if draft.finish_reason == "stop" else -1
        try:
            return tuple(
                self._context.chat(messages, tools, after=(num_earlier - 1, last)).tolist()
            )
        except ValueError:
            return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the errors of its group, and their causes."""
    yield error
    cause = error.__cause__ or error.__context__
    for each in (*getattr(error, "exceptions", ()), *([cause] if cause else [])):
        yield from _chain(each)


def _statuses(error: BaseException) -> list[int]:
    """Return the HTTP statuses that an error of any SDK carries."""
    objects = (error, getattr(error, "response", None))
    names = ("status_code", "status", "code")
    statuses = (getattr(carrier, name, None) for carrier in objects for name in names)
    return [status for status in statuses if isinstance(status, int)]


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
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        name = f"call_{call_number}_{len(calls)}"
        calls.append({"id": name, "type": "function", "function": function})
    if not calls:
        return {"role": "assistant", "content": text}
    content = (content + text[end:]).rstrip()
    return {"role": "assistant", "content": content or None, "tool_calls": calls}


def _normal(message: Message) -> Message:
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CallRefused(f"expected a call of a function, found {call!r:.80}") from error


class ContentStream:
    """Receives tokens one by one, and passes on complete characters.

    With tools it passes on neither calls nor the white space before them.
    """

    def __init__(
        self, context: EpisodeContext, on_text: Callable[[str], None], *, has_tools: bool
    ) -> None:
        self._context, self._on_text, self._has_tools = context, on_text, has_tools
        self._tokens: list[int] = []
        self._num_shown = self._num_read = 0
        """Number of tokens before the last piece, and with it: text depends on earlier tokens."""
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
