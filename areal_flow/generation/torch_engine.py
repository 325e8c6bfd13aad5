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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_flow.errors import EngineError
from areal_flow.generation.protocol import GenerationSettings
from areal_flow.generation.sampling import sample, uniforms
from areal_flow.generation.scheduler import SlotScheduler
from areal_flow.generation.threaded_engine import ThreadedEngine
from areal_flow.models.attention import Prefix, SlotCache
from areal_flow.models.policy import assign_tensors, decode, empty_policy, prefill
from areal_flow.types import Completion, GroupRequest, Sampling
from areal_flow.weights.channel import WeightsReader

PREFILL_ROWS = 16
"""Prefixes prefilled together after an interruption."""


class TorchEngine:
    """An `EngineCore` over any Hugging Face causal language model."""

    def __init__(self, policy: Any, settings: GenerationSettings, *, version: int) -> None:
        self.policy = policy
        self.settings = settings
        self.version = version
        max_num_seqs, max_length = settings.max_num_seqs, settings.max_model_len
        self._scheduler = SlotScheduler(max_num_seqs)
        self._prompts: dict[str, tuple[Prefix, Tensor]] = {}
        """Prefilled prompts of groups with members that still wait, and their logits, `[1, V]`."""
        self._oldest_versions = [version] * max_num_seqs
        """Of the keys and values of each slot: what its next token counts as sampled by."""
        self._pending: tuple[Mapping[str, Tensor], int] | None = None
        with torch.inference_mode():
            shapes, _ = prefill(policy, [[0]])
            self._cache = SlotCache(shapes, max_num_seqs=max_num_seqs, max_length=max_length)

    def add(self, request: GroupRequest) -> None:
        num_tokens = len(request.prompt_tokens) + request.sampling.max_new_tokens
        if num_tokens > self.settings.max_model_len:
            raise EngineError(
                f"expected at most {self.settings.max_model_len} tokens of context, found "
                f"{len(request.prompt_tokens)} of prompt and {request.sampling.max_new_tokens} new "
                "ones: raise generation.max_model_len or shorten the prompt"
            )
        self._scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        self._scheduler.cancel(request_id)
        self._prompts.pop(request_id, None)

    def has_work(self) -> bool:
        return self._scheduler.has_work() or self._pending is not None

    @torch.inference_mode()
    def step(self) -> list[tuple[str, list[Completion]]]:
        may_switch = self.settings.interruption != "drain" or not self._scheduler.running
        if self._pending and may_switch:
            self._switch_weights()
        if not self._pending:
            for request_id, slots in self._scheduler.admit():
                self._start(request_id, slots)
        complete = self._scheduler.finish()
        if self._scheduler.running:
            self._decode()
            complete += self._scheduler.finish()
        return complete

    def load_weights(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        self._pending = (tensors, version)
        if self.settings.interruption != "drain":
            self._switch_weights()

    def _start(self, request_id: str, slots: list[int]) -> None:
        if request_id not in self._prompts:
            prompt = self._scheduler.running[slots[0]].request.prompt_tokens
            self._prompts[request_id] = prefill(self.policy, [prompt])
        prefix, logits_1V = self._prompts[request_id]
        self._cache.copy_prefix(prefix, 0, slots)
        for slot in slots:
            self._oldest_versions[slot] = self.version
        self._sample(logits_1V.expand(len(slots), -1), slots)
        if not self._scheduler.still_waiting(request_id):
            del self._prompts[request_id]

    def _decode(self) -> None:
        tokens_S = [0] * self.settings.max_num_seqs
        positions_S = [0] * self.settings.max_num_seqs
        for slot, sequence in self._scheduler.running.items():
            tokens_S[slot] = sequence.tokens[-1]
            positions_S[slot] = sequence.num_cached
        logits_SV = decode(self.policy, self._cache, tokens_S, positions_S)
        slots = sorted(self._scheduler.running)
        self._sample(logits_SV if len(slots) == len(logits_SV) else logits_SV[slots], slots)

    def _sample(self, logits_SV: Tensor, slots: list[int]) -> None:
        """Append one token to the sequence of each slot; `logits_SV` has one row for each."""
        running = self._scheduler.running
        by_sampling: dict[Sampling, list[int]] = {}
        for row, slot in enumerate(slots):
            by_sampling.setdefault(running[slot].request.sampling, []).append(row)
        for sampling, rows in by_sampling.items():
            sequences = [running[slots[row]] for row in rows]
            drawn_S = uniforms(
                [sequence.request.seeds[sequence.index] for sequence in sequences],
                [len(sequence.tokens) for sequence in sequences],
            )
            chosen_SV = logits_SV if len(rows) == len(slots) else logits_SV[rows]
            tokens_S, logprobs_S = sample(chosen_SV, drawn_S.to(logits_SV.device), sampling)
            versions = [self._oldest_versions[slots[row]] for row in rows]
            for sequence, *sampled in zip(
                sequences, tokens_S.tolist(), logprobs_S.tolist(), versions, strict=True
            ):
                sequence.append(*sampled)

    @torch.inference_mode()
    def _switch_weights(self) -> None:
        assert self._pending is not None
        tensors, self.version = self._pending
        self._pending = None
        assign_tensors(self.policy, tensors)
        self._prompts.clear()
        if self.settings.interruption == "interrupt":
            self._prefill_running()

    def _prefill_running(self) -> None:
        running = self._scheduler.running
        slots = sorted(running, key=lambda slot: running[slot].num_cached)
        for start in range(0, len(slots), PREFILL_ROWS):
            rows = slots[start : start + PREFILL_ROWS]
            prefixes = [
                np.concatenate((running[slot].request.prompt_tokens, running[slot].tokens[:-1]))
                for slot in rows
            ]
            prefix, _ = prefill(self.policy, prefixes)
            for row, slot in enumerate(rows):
                self._cache.copy_prefix(prefix, row, [slot])
                self._oldest_versions[slot] = self.version


async def start_torch_engine(
    model: Path, settings: GenerationSettings, reader: WeightsReader
) -> ThreadedEngine:
    """Start an engine in this process; see `EngineFactory`."""
    return ThreadedEngine(await asyncio.to_thread(_load_core, model, settings, reader))


def _load_core(model: Path, settings: GenerationSettings, reader: WeightsReader) -> TorchEngine:
    policy = empty_policy(model, dtype=settings.dtype, device=settings.device)
    version = reader.newest()
    assign_tensors(policy, reader.load(version))
    return TorchEngine(policy, settings, version=version)
