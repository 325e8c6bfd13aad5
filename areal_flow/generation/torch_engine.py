"""A torch engine with continuous batching: requests join and leave at any decode step.

A group's prompt is prefilled once, alone, and copied into its members' slots. All slots decode
together, always as the same number of rows, so a completion's numbers do not depend on its company.
New weights interrupt between two tokens: the cache is dropped, prefixes are prefilled with the new
weights, sampling goes on where it stood.

`TorchEngine` refuses to know where weights come from and what completions are for; one thread
drives it. `start_torch_engine` is what the registry names.

Letters: S slots, N prefixes, P padded prefix length, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_flow.config import GenerationSettings
from areal_flow.errors import EngineError
from areal_flow.generation.protocol import Interruption
from areal_flow.generation.sampling import sample, uniforms
from areal_flow.generation.scheduler import SlotScheduler
from areal_flow.generation.threaded_engine import ThreadedEngine
from areal_flow.models.attention import Prefix, SlotCache
from areal_flow.models.policy import assign_tensors, decode, empty_policy, prefill
from areal_flow.types import Completion, FinishReason, GroupRequest, Sampling, version_spans_of
from areal_flow.weights.channel import WeightsReader

PREFILL_ROWS = 16
"""Prefixes prefilled together after an interruption."""


@dataclass(slots=True)
class _Sequence:
    """A completion that is being sampled."""

    request: GroupRequest
    index: int
    oldest_version: int
    """Of the keys and values in its cache: what its tokens count as sampled by."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values the next decode step expects in the cache."""
        return len(self.request.prompt_tokens) + len(self.tokens) - 1

    @property
    def prefix(self) -> list[int]:
        return [*self.request.prompt_tokens, *self.tokens[:-1]]

    def finish_reason(self) -> FinishReason | None:
        if self.tokens[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        if len(self.tokens) >= self.request.sampling.max_new_tokens:
            return "length"
        return None

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            tuple(self.tokens), tuple(self.logprobs), version_spans_of(self.versions), reason
        )


@dataclass(slots=True)
class _Group:
    """A request, its finished members, and its prefilled prompt while members still wait."""

    request: GroupRequest
    finished: dict[int, Completion] = field(default_factory=dict)
    prompt_prefix: Prefix | None = None
    prompt_logits_1V: Tensor | None = None


class TorchEngine:
    """An `EngineCore` over any Hugging Face causal language model."""

    def __init__(
        self,
        policy: Any,
        *,
        version: int,
        max_num_seqs: int,
        max_model_len: int,
        interruption: Interruption = "interrupt",
    ) -> None:
        self.policy = policy
        self.version = version
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.interruption = interruption
        self._scheduler = SlotScheduler(max_num_seqs)
        self._groups: dict[str, _Group] = {}
        self._sequences: dict[int, _Sequence] = {}
        self._pending: tuple[Mapping[str, Tensor], int] | None = None
        with torch.inference_mode():
            shapes, _ = prefill(policy, [[0]])
            self._cache = SlotCache(shapes, max_num_seqs=max_num_seqs, max_length=max_model_len)

    def add(self, request: GroupRequest) -> None:
        num_tokens = len(request.prompt_tokens) + request.sampling.max_new_tokens
        if num_tokens > self.max_model_len:
            raise EngineError(
                f"expected at most {self.max_model_len} tokens of context, found "
                f"{len(request.prompt_tokens)} of prompt and {request.sampling.max_new_tokens} new "
                "ones: raise generation.max_model_len or shorten the prompt"
            )
        if not request.prompt_tokens:
            raise EngineError(f"request {request.request_id} has an empty prompt")
        if request.request_id in self._groups:
            raise EngineError(f"request {request.request_id} is running already")
        self._groups[request.request_id] = _Group(request)
        self._scheduler.add(request.request_id, len(request.seeds))

    def cancel(self, request_id: str) -> None:
        self._scheduler.cancel(request_id)
        self._groups.pop(request_id, None)
        self._sequences = {s: q for s, q in self._sequences.items() if s in self._scheduler.running}

    def has_work(self) -> bool:
        return self._scheduler.has_work() or self._pending is not None

    @torch.inference_mode()
    def step(self) -> list[tuple[str, list[Completion]]]:
        if self._pending and not (self.interruption == "drain" and self._sequences):
            self._switch_weights()
        if not self._pending:
            for request_id, slots in self._scheduler.admit():
                self._start(request_id, slots)
        complete = self._finish()
        if self._sequences:
            self._decode()
            complete += self._finish()
        return complete

    def load_weights(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        self._pending = (tensors, version)
        if self.interruption != "drain":
            self._switch_weights()

    def _start(self, request_id: str, slots: list[int]) -> None:
        group = self._groups[request_id]
        if group.prompt_prefix is None:
            group.prompt_prefix, group.prompt_logits_1V = prefill(
                self.policy, [list(group.request.prompt_tokens)]
            )
        assert group.prompt_logits_1V is not None
        self._cache.copy_prefix(group.prompt_prefix, 0, slots)
        for slot in slots:
            member = self._scheduler.running[slot]
            self._sequences[slot] = _Sequence(group.request, member.index, self.version)
        self._sample(group.prompt_logits_1V.expand(len(slots), -1), slots)
        if not self._scheduler.still_waiting(request_id):
            group.prompt_prefix = group.prompt_logits_1V = None

    def _decode(self) -> None:
        tokens_S = [0] * self.max_num_seqs
        positions_S = [0] * self.max_num_seqs
        for slot, sequence in self._sequences.items():
            tokens_S[slot] = sequence.tokens[-1]
            positions_S[slot] = sequence.num_cached
        logits_SV = decode(self.policy, self._cache, tokens_S, positions_S)
        slots = sorted(self._sequences)
        self._sample(logits_SV if len(slots) == self.max_num_seqs else logits_SV[slots], slots)

    def _sample(self, logits_SV: Tensor, slots: list[int]) -> None:
        """Append one token to the sequence of each slot; `logits_SV` has one row for each."""
        by_sampling: dict[Sampling, list[int]] = {}
        for row, slot in enumerate(slots):
            by_sampling.setdefault(self._sequences[slot].request.sampling, []).append(row)
        for sampling, rows in by_sampling.items():
            sequences = [self._sequences[slots[row]] for row in rows]
            drawn_S = uniforms(
                [sequence.request.seeds[sequence.index] for sequence in sequences],
                [len(sequence.tokens) for sequence in sequences],
            )
            chosen_SV = logits_SV if len(rows) == len(slots) else logits_SV[rows]
            tokens_S, logprobs_S = sample(chosen_SV, drawn_S.to(logits_SV.device), sampling)
            for sequence, token, logprob in zip(
                sequences, tokens_S.tolist(), logprobs_S.tolist(), strict=True
            ):
                sequence.tokens.append(token)
                sequence.logprobs.append(logprob)
                sequence.versions.append(sequence.oldest_version)

    def _finish(self) -> list[tuple[str, list[Completion]]]:
        complete = []
        for slot, sequence in list(self._sequences.items()):
            reason = sequence.finish_reason()
            if reason is None:
                continue
            del self._sequences[slot]
            self._scheduler.finish(slot)
            request = sequence.request
            group = self._groups[request.request_id]
            group.finished[sequence.index] = sequence.completion(reason)
            if len(group.finished) == len(request.seeds):
                del self._groups[request.request_id]
                members = [group.finished[index] for index in range(len(request.seeds))]
                complete.append((request.request_id, members))
        return complete

    @torch.inference_mode()
    def _switch_weights(self) -> None:
        assert self._pending is not None
        tensors, self.version = self._pending
        self._pending = None
        assign_tensors(self.policy, tensors)
        for group in self._groups.values():
            group.prompt_prefix = group.prompt_logits_1V = None
        if self.interruption == "interrupt":
            self._prefill_running()

    def _prefill_running(self) -> None:
        slots = sorted(self._sequences, key=lambda slot: self._sequences[slot].num_cached)
        for start in range(0, len(slots), PREFILL_ROWS):
            rows = slots[start : start + PREFILL_ROWS]
            prefix, _ = prefill(self.policy, [self._sequences[slot].prefix for slot in rows])
            for row, slot in enumerate(rows):
                self._cache.copy_prefix(prefix, row, [slot])
                self._sequences[slot].oldest_version = self.version


async def start_torch_engine(
    model: Path, settings: GenerationSettings, reader: WeightsReader
) -> ThreadedEngine:
    """Start an engine in this process; see `EngineFactory`."""
    return ThreadedEngine(await asyncio.to_thread(_load_core, model, settings, reader))


def _load_core(model: Path, settings: GenerationSettings, reader: WeightsReader) -> TorchEngine:
    policy = empty_policy(model, dtype=settings.dtype, device=settings.device)
    version = reader.newest()
    assign_tensors(policy, reader.load(version))
    return TorchEngine(
        policy,
        version=version,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        interruption=settings.interruption,
    )
