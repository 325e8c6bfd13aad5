"""Episodes without a cluster: an exact engine and a scripted judge that record requests."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from areal_flow.core.types import (
    Completion,
    Episode,
    GroupRequest,
    Prompt,
    Sampling,
    Score,
    Tokens,
    VersionSpan,
    as_tokens,
)
from areal_flow.log.ledger_row import group_seeds
from areal_flow.policy.tokenizer.chat import Message, ToolCall
from tests.fakes import BigramEngine

STOP = 0
LOGITS = [[math.sin(3 * a + b * b) for b in range(8)] for a in range(8)]
PROMPT = Prompt("p", "a question", "7", 1, as_tokens([3, 5]))

Judge = Callable[[Tokens], Score]


def wrong(_: Tokens) -> Score:
    return Score(0.0, "incorrect", message="no")


def judged_by_length(tokens: Tokens) -> Score:
    """Right or wrong, depending on the length of the completion."""
    return Score(1.0, "correct") if len(tokens) % 2 else Score(0.0, "incorrect", message="no")


class FakeServices:
    """`EpisodeServices` over a bigram engine whose version may grow while it decodes."""

    is_chat = False
    vocab_size = len(LOGITS)

    def __init__(
        self,
        judge: Judge = judged_by_length,
        *,
        max_model_len: int = 64,
        max_new_tokens: int = 12,
        tokens_per_version: int | None = None,
    ) -> None:
        self.sampling = Sampling(max_new_tokens, stop_token_ids=(STOP,))
        self.max_model_len = max_model_len
        self.requests: list[GroupRequest] = []
        self.scored: list[Sequence[Tokens]] = []
        self.tool_calls: list[tuple[str, tuple[Any, ...]]] = []
        self._judge = judge
        self._tokens_per_version = tokens_per_version
        self._num_steps = 0
        self._version = 0

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        self.requests.append(request)
        engine = BigramEngine(LOGITS, version=self._version, max_num_seqs=64)
        engine.add(request)
        while True:
            if finished := engine.step():
                return finished[0][1]
            self._num_steps += 1
            if self._tokens_per_version and self._num_steps % self._tokens_per_version == 0:
                self._version += 1
            engine.version = self._version

    async def score(self, prompt: Prompt, completions: Sequence[Tokens]) -> Sequence[Score]:
        self.scored.append(completions)
        return [self._judge(tokens) for tokens in completions]

    async def call_tool(self, path: str, calls: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        self.tool_calls += [(path, arguments) for arguments in calls]
        return range(len(self.tool_calls))[-len(calls) :]

    def next_turn(self, contents: Sequence[str], ended_by: int, role: str) -> Tokens:
        assert (ended_by, role) == (STOP, "user")
        return self.encode(*contents)

    def chat_calls(self, prompt: Tokens, answer: Tokens) -> Sequence[ToolCall]:
        raise NotImplementedError

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        *,
        after: tuple[int, int] | None = None,
    ) -> Tokens:
        if any(message["role"] == "refused" for message in messages):
            raise ValueError("the chat template does not render messages of refused")
        shown = messages if after is None else messages[after[0] + 1 :]
        return self.encode("".join(f"{m['role'][0]}{m['content'][:2]}" for m in shown))

    def conversation(self, prompt: Prompt) -> Sequence[Message]:
        return [{"role": "user", "content": prompt.text}]

    def encode(self, text: str) -> Tokens:
        return as_tokens([ord(character) % 7 + 1 for character in text])

    def decode(self, tokens: Tokens) -> str:
        return " ".join(map(str, tokens))


class TextServices(FakeServices):
    """`EpisodeServices` of a policy that is a function of the text so far; a token is a byte.

    With `is_chat`, a turn is `<role>content`, and a call is JSON on a line of its own.
    """

    vocab_size = 256

    def __init__(
        self, policy: Callable[[str], str], *, is_chat: bool = False, **limits: int
    ) -> None:
        super().__init__(**{"max_model_len": 4000, "max_new_tokens": 1000, **limits})
        self.policy, self.is_chat = policy, is_chat

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        self.requests.append(request)
        return [self._completion(request, index) for index in range(len(request.seeds))]

    def _completion(self, request: GroupRequest, index: int) -> Completion:
        text, sampling = self.policy(self.decode(request.prompt_tokens)), request.sampling
        stops = [text.find(each) + len(each) for each in sampling.stop_strings if each in text]
        tokens = [*text[: min(stops)].encode()] if stops else [*text.encode(), STOP]
        reason = "stop" if len(tokens) <= sampling.max_new_tokens else "length"
        tokens = tokens[: sampling.max_new_tokens]
        for token in tokens if request.on_token else ():
            request.on_token(index, token)
        logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
        spans = (VersionSpan(0, len(tokens)),)
        return Completion(as_tokens(tokens), logprobs, spans, reason)

    def next_turn(self, contents: Sequence[str], ended_by: int, role: str) -> Tokens:
        if not self.is_chat:
            return self.encode("".join(contents))
        return self.encode("".join(f"<{role}>{each.strip()}" for each in contents) + "<assistant>")

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        *,
        after: tuple[int, int] | None = None,
    ) -> Tokens:
        shown = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return self.encode(f"{json.dumps(tools) if tools else ''}{shown}<assistant>")

    def chat_calls(self, prompt: Tokens, answer: Tokens) -> Sequence[ToolCall]:
        lines = self.decode(answer).splitlines()
        return [ToolCall(**json.loads(line)) for line in lines if line.startswith("{")]

    def encode(self, text: str) -> Tokens:
        return as_tokens([*text.encode()])

    def decode(self, tokens: Tokens) -> str:
        return bytes(token for token in tokens if token != STOP).decode(errors="replace")


def episode_of(group_size: int = 6, *, index: int = 4, attempt: int = 0) -> Episode:
    """Return an episode of `PROMPT`."""
    return Episode(index, PROMPT, group_seeds(0, index, group_size), attempt, 1, datetime.now(UTC))


def exact_logprob(before: int, token: int) -> float:
    """Return the bigram policy's log-probability of a token after another."""
    return LOGITS[before][token] - math.log(sum(math.exp(value) for value in LOGITS[before]))
