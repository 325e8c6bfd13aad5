"""Decides which completion decodes in which slot, keeps what it has sampled, and sees it end.

How tokens are sampled is unknown here: no torch, no threads.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tokenizers.decoders import DecodeStream

from areal_flow.core.errors import EngineError
from areal_flow.core.types import Completion, FinishReason, GroupRequest, Sampling, VersionSpan

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class StopStringSearch:
    """Searches a completion's text for stop strings, which may span tokens.

    The text is the tokenizer's, of prompt and completion, with special tokens; only what follows
    the prompt is searched.
    """

    def __init__(self, tokenizer: Tokenizer, request: GroupRequest) -> None:
        self._tokenizer = tokenizer
        self._sampling = request.sampling
        prompt = request.prompt_tokens.tolist()
        self._stream = DecodeStream(ids=prompt, skip_special_tokens=False)
        self._num_kept = max(map(len, request.sampling.stop_strings)) - 1
        self._text = ""
        self._num_tokens = 0

    def ends_with(self, token: int) -> bool:
        """Take the next token; return whether its text completes a stop string.

        A character of several tokens belongs to the last of them. A stop string within the first
        `min_new_tokens` tokens is ignored.
        """
        num_before, text = len(self._text), self._text + self._text_of(token)
        self._text = text[max(0, len(text) - self._num_kept) :]
        self._num_tokens += 1
        if self._num_tokens <= self._sampling.min_new_tokens:
            return False
        return any(
            text.find(string, max(0, num_before + 1 - len(string))) >= 0
            for string in self._sampling.stop_strings
        )

    def _text_of(self, token: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:  # the tokenizers library raises nothing narrower
            if not str(error).startswith("Invalid prefix"):
                raise
            # Bytes that are no character are left out, as in vLLM:
            # https://github.com/vllm-project/vllm/issues/17448
            self._stream = DecodeStream(skip_special_tokens=False)
            return self._stream.step(self._tokenizer, token) or ""


@dataclass(slots=True)
class SampledSequence:
    """One completion of a group while it is sampled."""

    request: GroupRequest
    index: int
    distribution: Sampling
    """How its tokens are drawn: the same object for all sequences with equal sampling."""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    spans: list[list[int]] = field(default_factory=list)
    """`[version, length]` of each run of tokens that one policy version sampled."""
    finish_reason: FinishReason | None = None
    """None while it is sampled."""
    stop_strings: StopStringSearch | None = None

    @property
    def num_cached(self) -> int:
        """Number of tokens whose keys and values the next decode step needs in a cache."""
        return len(self.request.prompt_tokens) + len(self.tokens) - 1

    def prefix(self, start: int, end: int) -> NDArray[np.int64]:
        """Return tokens `start:end` of prompt and completion together."""
        prompt, sampled = self.request.prompt_tokens, np.frombuffer(self.tokens, np.int32)
        parts = prompt[start:end], sampled[max(0, start - len(prompt)) : max(0, end - len(prompt))]
        return np.concatenate(parts, dtype=np.int64)

    def append(self, token: int, logprob: float, version: int) -> None:
        if self.request.on_token:
            self.request.on_token(self.index, token)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][1] += 1
        else:
            self.spans.append([version, 1])
        sampling = self.request.sampling
        if token in sampling.stop_token_ids or (
            self.stop_strings and self.stop_strings.ends_with(token)
        ):
            self.finish_reason = "stop"
        elif len(self.tokens) >= sampling.max_new_tokens:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        spans = tuple(VersionSpan(version, length) for version, length in self.spans)
        tokens, logprobs = np.array(self.tokens), np.array(self.logprobs)
        return Completion(tokens, logprobs, spans, self.finish_reason)


def require_room(request: GroupRequest, max_model_len: int) -> None:
    num_prompt, num_new = len(request.prompt_tokens), request.sampling.max_new_tokens
    if num_prompt + num_new > max_model_len:
        raise EngineError(
            f"expected at most {max_model_len} tokens of context, found {num_prompt} of prompt and "
            f"{num_new} new ones: raise generation.max_model_len or shorten the prompt"
        )


class SlotScheduler:
    """Continuous batching over a fixed number of slots, first come first served."""

    def __init__(self, max_num_seqs: int, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._waiting: deque[SampledSequence] = deque()
        self._distributions: dict[Sampling, Sampling] = {}
        self._groups: dict[str, list[SampledSequence]] = {}
        self.running: dict[int, SampledSequence] = {}
        """By slot."""

    def add(self, request: GroupRequest) -> None:
        if not len(request.prompt_tokens):
            raise EngineError(f"request {request.request_id} has an empty prompt")
        if request.request_id in self._groups:
            raise EngineError(f"request {request.request_id} is running already")
        sampling = request.sampling.distribution
        sampling = self._distributions.setdefault(sampling, sampling)
        members = [SampledSequence(request, index, sampling) for index in range(len(request.seeds))]
        if request.sampling.stop_strings:
            if self._tokenizer is None:
                raise EngineError(f"request {request.request_id} has stop strings: no tokenizer")
            for member in members:
                member.stop_strings = StopStringSearch(self._tokenizer, request)
        self._groups[request.request_id] = members
        self._waiting.extend(members)

    def has_work(self) -> bool:
        return bool(self._waiting or self.running)

    def occupancy(self) -> dict[str, float]:
        return {"batch_size": len(self.running), "queue_length": len(self._waiting)}

    def has_started(self) -> bool:
        """Return whether a member has begun and not ended, with a slot or without."""
        return bool(self.running or (self._waiting and self._waiting[0].tokens))

    def admit(self, place: Callable[[int, SampledSequence], bool] | None = None) -> None:
        """Give free slots to waiting members, in order, until `place` returns False."""
        while self._free and self._waiting:
            if place and not place(self._free[-1], self._waiting[0]):
                break
            self.running[self._free.pop()] = self._waiting.popleft()

    def preempt(self, slot: int) -> None:
        """Free a slot; its member keeps its tokens, and is the first to continue."""
        self._waiting.appendleft(self._vacate(slot))

    def still_waiting(self, request_id: str) -> bool:
        """Return whether a member of this group has not started yet."""
        return any(m.request.request_id == request_id and not m.tokens for m in self._waiting)

    def finish(self) -> list[tuple[str, list[Completion]]]:
        """Free the slots of members that have ended; return the groups that are complete."""
        ended = [slot for slot, member in self.running.items() if member.finish_reason]
        request_ids = dict.fromkeys(self._vacate(slot).request.request_id for slot in ended)
        complete = [i for i in request_ids if all(m.finish_reason for m in self._groups[i])]
        return [(i, [m.completion() for m in self._groups.pop(i)]) for i in complete]

    def cancel(self, request_id: str) -> None:
        self._groups.pop(request_id, None)
        self._waiting = deque(m for m in self._waiting if m.request.request_id != request_id)
        for slot, member in list(self.running.items()):
            if member.request.request_id == request_id:
                self._vacate(slot)

    def _vacate(self, slot: int) -> SampledSequence:
        self._free.append(slot)
        return self.running.pop(slot)
