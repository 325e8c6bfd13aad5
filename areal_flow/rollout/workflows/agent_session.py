"""The calls of one agent, as conversations to which tokens are only ever appended.

A call whose messages continue an earlier answer extends that conversation. Any other starts a new
one, a branch: the agent rewrote its history, the chat template rewrites earlier answers, or two
calls continue one answer. Sampled tokens are never tokenised again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any

from areal_flow.core.errors import ArealFlowError, EngineError, WeightsError
from areal_flow.core.types import Score
from areal_flow.policy.tokenizer.chat import PROMPT_END, Message, begins_reasoning
from areal_flow.rollout.workflows.agent_messages import (
    CallRefused,
    ContentStream,
    answer_message,
    normal_message,
)
from areal_flow.rollout.workflows.episode import EpisodeContext, TrajectoryDraft


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
        messages = [normal_message(message) for message in messages]
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
        conversation.messages = [*messages, normal_message(message)]
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
