"""The calls of one agent, as conversations to which tokens are only ever appended.

A call whose messages, or whose prompt, continue an earlier answer extends that conversation. Any
other starts a new one, a branch: the agent rewrote its history, the chat template rewrites earlier
answers, or two calls continue one answer. Further choices of a call are branches, too. Sampled
tokens are never tokenised again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from time import monotonic
from typing import Any

import numpy as np

from areal_flow.core.concurrency import all_of
from areal_flow.core.errors import ArealFlowError, EngineError, WeightsError
from areal_flow.core.types import Completion, Score, Tokens, ToolRecord, as_tokens
from areal_flow.policy.tokenizer.chat import PROMPT_END, Message, begins_reasoning
from areal_flow.rollout.workflows.agent_messages import (
    CallRefused,
    ContentStream,
    TokenTexts,
    answer_message,
    before_stop,
    normal_message,
)
from areal_flow.rollout.workflows.episode import EpisodeContext, TrajectoryDraft


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """What an agent requests: an answer to messages, or the text that follows a prompt."""

    messages: Sequence[Message] = ()
    tools: Sequence[Message] = ()
    prompt: str | Sequence[int] | None = None
    """A text or its tokens, instead of messages."""
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    """Stop strings besides the recipe's, which the answer ends before."""
    num_choices: int = 1
    has_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    message: Message
    finish_reason: str
    num_prompt_tokens: int
    num_completion_tokens: int
    logprobs: Sequence[tuple[str, float]] = ()
    """The text and log-probability of each sampled token, if the call requests them."""


@dataclass
class Conversation:
    """One branch: its messages so far, the last of them an answer, and their tokens."""

    draft: TrajectoryDraft
    tools: Sequence[Message] = ()
    messages: Sequence[Message] = ()
    text: str | None = None
    """Without messages: the prompt and what followed it, as the agent got it."""
    hidden: str = ""
    """The end of the last answer's text, which the agent did not get: its stop string."""
    num_answers: int = 0
    answered_at: float = 0.0
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
        self.responses: dict[str, Sequence[Message]] = {}
        """Messages up to each answer that a later call may name instead of repeating them."""

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
        self, call: Call, on_text: Callable[[str], None] | None = None
    ) -> list[Answer]:
        """Return the policy's answer for each choice, each of which counts as a call.

        `on_text` gets the beginning of the content as it is sampled.
        """
        first = self._num_calls + 1
        self._num_calls += call.num_choices
        if self._num_calls > self._max_calls:
            self.ended_by = self.limits[429] = f"workflow.max_calls ({self._max_calls})"
            raise CallRefused(f"{self.ended_by} calls were made", status=429, code="max_calls")
        call = replace(call, messages=[normal_message(message) for message in call.messages])
        try:
            choices = self._choices(call)
        except ValueError as error:
            raise CallRefused(str(error)) from error
        for conversation, _ in choices:
            conversation.is_busy = True
        try:
            return await all_of(
                self._answer(call, number, *choice, on_text)
                for number, choice in enumerate(choices, first)
            )
        finally:
            for conversation, _ in choices:
                conversation.is_busy = False

    async def _answer(
        self,
        call: Call,
        number: int,
        conversation: Conversation,
        draft: TrajectoryDraft,
        on_text: Callable[[str], None] | None,
    ) -> Answer:
        decode, stop, tokens = self._context.decode, call.stop, draft.tokens
        try:
            completion = await self._context.generate(
                tokens,
                conversation.num_answers,
                branch=draft.branch,
                max_new_tokens=call.max_new_tokens,
                stop_strings=stop,
                on_token=on_text
                and ContentStream(decode, on_text, has_tools=bool(call.tools), stop=stop),
            )
        except (EngineError, WeightsError) as error:
            self.failure = error
            raise
        except ArealFlowError as error:
            conversation.ended_by = self.limits[400] = f"the context: {error}"
            raise CallRefused(str(error), code="context_length_exceeded") from error
        text = decode(completion.tokens)
        visible = before_stop(text, stop)
        message: Message = {"role": "assistant", "content": visible}
        if call.prompt is None:
            is_thinking = begins_reasoning(decode(tokens[-PROMPT_END:]))
            message = answer_message(
                visible, call.tools, call_number=number, is_thinking=is_thinking
            )
            conversation.messages = [*call.messages, normal_message(message)]
        else:
            prompt = call.prompt if isinstance(call.prompt, str) else decode(call.prompt)
            conversation.text = prompt + visible
        conversation.hidden = text[len(visible) :]
        conversation.ended_by = ""
        conversation.draft = draft.with_completion(completion)
        conversation.num_answers += 1
        conversation.answered_at = monotonic()
        return Answer(
            message,
            "tool_calls" if message.get("tool_calls") else completion.finish_reason,
            len(tokens),
            len(completion.tokens),
            self._logprobs(completion) if call.has_logprobs else (),
        )

    def _logprobs(self, completion: Completion) -> list[tuple[str, float]]:
        texts = TokenTexts(self._context.decode)
        sampled = zip(completion.tokens.tolist(), completion.logprobs.tolist(), strict=True)
        return [(texts.text_of(token), logprob) for token, logprob in sampled]

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
            if c.draft.loss_mask.any()
        ]

    def _choices(self, call: Call) -> list[tuple[Conversation, TrajectoryDraft]]:
        """Return a conversation for each choice, and its tokens so far.

        The first choice extends the conversation that the call continues; others branch from it.
        """
        candidates = [
            (each, draft)
            for each in reversed(self._conversations)
            if (draft := self._extended(each, call))
        ]
        choices = []
        if candidates:  # a prompt may continue several, each the beginning of the next
            choices.append(max(candidates, key=lambda choice: len(choice[0].text or "")))
        first, draft = choices[0] if choices else self._start(call)
        while len(choices) < call.num_choices:
            branch = len(self._conversations)
            copy = replace(first, draft=first.draft.as_branch(branch))
            self._conversations.append(copy)
            choices.append((copy, draft.as_branch(branch)))
        return choices

    def _start(self, call: Call) -> tuple[Conversation, TrajectoryDraft]:
        if call.prompt is None:
            draft = TrajectoryDraft(self._context.chat(call.messages, call.tools))
        else:
            draft = TrajectoryDraft(self._tokens(call.prompt))
        return Conversation(draft, call.tools), draft

    def _extended(self, conversation: Conversation, call: Call) -> TrajectoryDraft | None:
        """Return a conversation with the tokens of a call that continues it, else None."""
        if conversation.is_busy or not conversation.num_answers:
            return None
        if call.prompt is not None:
            tokens = self._rest_of_prompt(conversation, call.prompt)
            return None if tokens is None else conversation.draft.with_environment(tokens)
        num_earlier = len(conversation.messages)
        new = call.messages[num_earlier:]
        is_continued = (
            conversation.text is None
            and conversation.tools == call.tools
            and conversation.messages == call.messages[:num_earlier]
            and new
            and all(message["role"] != "assistant" for message in new)
        )
        if not is_continued:
            return None
        draft = conversation.draft
        has_end = draft.finish_reason == "stop" and not conversation.hidden
        after = num_earlier - 1, int(draft.output_tokens[-1]) if has_end else -1
        try:
            tokens = self._context.chat(call.messages, call.tools, after=after)
        except ValueError:
            return None
        return draft.with_environment(tokens).with_calls([*_records(conversation, new)])

    def _rest_of_prompt(
        self, conversation: Conversation, prompt: str | Sequence[int]
    ) -> Tokens | None:
        """Return the tokens of a prompt after a conversation's; None unless it continues that."""
        if conversation.text is None:
            return None
        draft, hidden = conversation.draft, conversation.hidden
        rest: str | Sequence[int]
        if isinstance(prompt, str):
            is_continued = prompt.startswith(conversation.text)
            rest = prompt[len(conversation.text) :]
        else:
            is_continued = np.array_equal(prompt[: len(draft.tokens)], draft.tokens)
            rest = prompt[len(draft.tokens) :]
        if not is_continued or not (rest or draft.finish_reason == "length"):
            return None
        if isinstance(rest, str):  # agents append the stop string, which the tokens have already
            lengths = range(len(hidden), -1, -1)
            rest = rest[next(n for n in lengths if rest.startswith(hidden[:n])) :]
        return self._tokens(rest)

    def _tokens(self, prompt: str | Sequence[int]) -> Tokens:
        if isinstance(prompt, str):
            return self._context.encode(prompt)
        if max(prompt, default=0) >= (size := self._context.vocab_size):
            raise ValueError(f"expected tokens below {size}, found {max(prompt)}")
        return as_tokens(prompt)


def _records(conversation: Conversation, new: Sequence[Message]) -> Iterator[ToolRecord]:
    """Yield the last answer's calls of tools whose results are among new messages."""
    calls = conversation.messages[-1].get("tool_calls", ())
    functions = {call["id"]: call["function"] for call in calls}
    turn, duration_s = conversation.num_answers - 1, monotonic() - conversation.answered_at
    for message in new:
        if function := functions.get(message.get("tool_call_id")):
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            arguments = arguments.encode(errors="replace").decode()  # it may have lone surrogates
            result = message["content"]
            yield ToolRecord(turn, function["name"], arguments, result, None, duration_s)


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
