"""A torch engine with continuous batching: the CPU's, and the reference of every other engine.

Requests join and leave at any decode step, which prefills new tokens and samples one token for
every sequence that is ready. Prompts of several groups are prefilled together, each once and in
chunks, and their full pages are shared. When pages run out, the newest sequence gives its own up
and is prefilled again later. New weights interrupt between two tokens: prefixes are prefilled with
them, and then sampling continues.

Letters: S sequences, N chunks, V vocabulary.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from areal_flow.core.types import Completion, GroupRequest
from areal_flow.policy.models.linear import pack_linear_layers
from areal_flow.policy.models.paged import (
    Chunk,
    PagedCache,
    Pages,
    decode,
    fill_pages,
    page_tokens_for,
    prefill,
)
from areal_flow.policy.models.policy import assign_tensors, policy_with
from areal_flow.policy.tokenizer.directory import tokenizer_of
from areal_flow.policy.weights.channel import WeightsReader
from areal_flow.rollout.engines.pages import (
    CACHE_SHARE,
    PageTables,
    PromptPages,
    SlotPages,
    cached_numbers,
)
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.rollout.engines.sampling import adjust_logits, sample, uniforms
from areal_flow.rollout.engines.scheduler import SampledSequence, SlotScheduler, require_room
from areal_flow.rollout.engines.threaded_engine import ThreadedEngine

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PREFILL_TOKENS_PER_STEP = 8192
"""Maximum number of tokens that are prefilled before the next decode step."""

CPU_TOKENS_PER_PASS = 2048
"""Larger passes on a CPU are a fifth slower, since activations do not fit into its caches."""

PlannedChunk = tuple[Chunk, PromptPages | SlotPages]
"""A chunk, and the pages of the prompt or the sequence that it belongs to."""


class PrefillPlan:
    """Which tokens of prompts and prefixes to compute next, in chunks.

    A group's prompt is computed once for all of its members, and so is what follows its full pages.
    """

    def __init__(
        self,
        running: Mapping[int, SampledSequence],
        pages: PageTables,
        *,
        tokens_per_pass: float,
        batch_invariant: bool,
    ) -> None:
        self.tokens_per_step = PREFILL_TOKENS_PER_STEP
        self.pending_prefill: dict[int, None] = {}
        """Slots whose prompt or prefix is not computed yet, in their order."""
        self._running = running
        self._pages = pages
        self._tokens_per_pass = tokens_per_pass
        self._batch_invariant = batch_invariant

    def passes(self) -> Iterator[list[PlannedChunk]]:
        """Yield the chunks of each pass; they count as computed from then on."""
        batch: list[PlannedChunk] = []
        num_tokens = 0
        for planned in self._chunks():
            num_tokens += len(planned[0].tokens)
            if batch and (self._batch_invariant or num_tokens > self._tokens_per_pass):
                yield batch
                batch, num_tokens = [], len(planned[0].tokens)
            batch.append(planned)
        if batch:
            yield batch

    def _chunks(self) -> Iterator[PlannedChunk]:
        """Yield chunks within a step's budget, of prompts before those of single members."""
        budget = self.tokens_per_step
        for slot in list(self.pending_prefill):
            member = self._running[slot]
            for part, pages, required, peers in self._parts(slot, member):
                end = min(required, part.num_computed + budget)
                if part.num_computed < end:
                    tokens = member.prefix(part.num_computed, end)
                    copies = [self._pages.tables_SW[peer] for peer in peers]
                    yield Chunk(tokens, part.num_computed, pages, copies), part
                    budget -= 0 if self._batch_invariant else len(tokens)
                    part.num_computed = end
                    for peer in peers:
                        self._pages.slots[peer].num_computed = end
                if part.num_computed < required:
                    break
            else:
                del self.pending_prefill[slot]

    def _parts(
        self, slot: int, member: SampledSequence
    ) -> Iterator[tuple[PromptPages | SlotPages, Pages, int, Sequence[int]]]:
        """Yield each part of a member's prefix, its pages, the number of tokens to compute, and
        other slots with the same tokens, which get the same keys and values."""
        held, pages = self._pages.slots[slot], self._pages.tables_SW[slot]
        if held.prompt is not None:
            prompt = held.prompt
            required = prompt.num_shared if member.tokens else prompt.num_tokens
            yield prompt, np.array(prompt.pages), required, ()
            if held.num_computed < prompt.num_tokens and not self._batch_invariant:
                slots = self._pages.slots
                peers = [
                    peer
                    for peer in self.pending_prefill
                    if peer != slot
                    and slots[peer].prompt is prompt
                    and slots[peer].num_computed == held.num_computed
                ]
                yield held, pages, prompt.num_tokens, peers
        yield held, pages, member.num_cached, ()


class TorchEngine:
    def __init__(
        self,
        policy: Any,
        settings: GenerationSettings,
        *,
        version: int,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Take a policy with the weights of `version`; stop strings need a tokenizer."""
        self.policy = policy
        self.settings = settings
        self.version = version
        self._batch_invariant = settings.batch_invariant
        page_tokens = page_tokens_for(settings.max_model_len)
        num_pages = settings.num_pages(page_tokens, room=_room(policy, page_tokens))
        self._idle_page = num_pages
        self._scheduler = SlotScheduler(settings.max_num_seqs, tokenizer)
        self._pages = PageTables(
            num_pages=num_pages,
            page_tokens=page_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
        )
        self.prefill = PrefillPlan(
            self._scheduler.running,
            self._pages,
            tokens_per_pass=CPU_TOKENS_PER_PASS if policy.device.type == "cpu" else math.inf,
            batch_invariant=self._batch_invariant,
        )
        self._prompts: dict[str, PromptPages] = {}
        """By request, while members have not started."""
        self._prompt_logits: dict[PromptPages, Tensor] = {}
        """Logits `[V]` of the first token, of prompts that are computed."""
        self._oldest_versions = [version] * settings.max_num_seqs
        """Oldest version in each slot's cache, which its next token counts as sampled by."""
        self._pending: tuple[Mapping[str, Tensor], int] | None = None
        pack_linear_layers(self.policy, num_rows=settings.max_num_seqs)
        with torch.inference_mode():
            self._cache = PagedCache(policy, num_pages=num_pages + 1, page_tokens=page_tokens)

    def add(self, request: GroupRequest) -> None:
        require_room(request, self.settings.max_model_len)
        self._scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        self._scheduler.cancel(request_id)
        self._release_ended()
        self._close_prompt(request_id)

    def has_work(self) -> bool:
        return self._scheduler.has_work() or self._pending is not None

    def occupancy(self) -> dict[str, float]:
        taken = 1 - self._pages.num_free / self._idle_page
        return {**self._scheduler.occupancy(), "cache_fraction": taken}

    @torch.inference_mode()
    def step(self) -> list[tuple[str, list[Completion]]]:
        if self._pending and not self._scheduler.has_started():
            self._switch_weights()
        self._scheduler.admit(self._place)
        self._prefill()
        complete = self._finish() if self._start_members() else []
        if slots := self._slots_to_decode():
            self._decode(slots)
            complete += self._finish()
        return complete

    def load_weights(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        self._pending = (tensors, version)
        if self.settings.interruption != "drain":
            self._switch_weights()

    def _finish(self) -> list[tuple[str, list[Completion]]]:
        complete = self._scheduler.finish()
        self._release_ended()
        return complete

    def _release_ended(self) -> None:
        for slot in self._pages.slots.keys() - self._scheduler.running.keys():
            self._release(slot)

    def _release(self, slot: int) -> None:
        self._pages.release(slot)
        self.prefill.pending_prefill.pop(slot, None)

    def _place(self, slot: int, member: SampledSequence) -> bool:
        """Take pages for a member that is to get this slot; return whether there are enough."""
        request = member.request
        if member.tokens:
            num_tokens = member.num_cached + 1
            has_pages = self._pages.resume(slot, num_tokens) or (
                self._close_idle_prompts() and self._pages.resume(slot, num_tokens)
            )
        elif self._pending:
            return False
        else:
            if not (prompt := self._prompts.get(request.request_id)):
                num_tokens = len(request.prompt_tokens)
                prompt = self._pages.open_prompt(num_tokens)
                if prompt is None and self._close_idle_prompts():
                    prompt = self._pages.open_prompt(num_tokens)
                if prompt is None:
                    return False
                self._prompts[request.request_id] = prompt
            has_pages = self._pages.start(slot, prompt)
        if has_pages:
            self._oldest_versions[slot] = self.version
            self.prefill.pending_prefill[slot] = None
        return has_pages

    def _prefill(self) -> None:
        for planned in self.prefill.passes():
            chunks = [chunk for chunk, _ in planned]
            prompts = {
                row: part
                for row, (chunk, part) in enumerate(planned)
                if isinstance(part, PromptPages) and chunk.end == part.num_tokens
            }
            if not prompts:
                fill_pages(self.policy, self._cache, chunks)
                continue
            logits_NV = prefill(self.policy, self._cache, chunks)
            self._prompt_logits |= {prompt: logits_NV[row] for row, prompt in prompts.items()}

    def _start_members(self) -> bool:
        """Sample first tokens of members whose prompt is computed; return whether there are any."""
        starting: dict[PromptPages, list[int]] = {}
        if self._prompt_logits:
            for slot, member in self._scheduler.running.items():
                prompt = self._pages.slots[slot].prompt
                if not member.tokens and prompt in self._prompt_logits:
                    starting.setdefault(prompt, []).append(slot)
        if not starting:
            return False
        for prompt, slots in starting.items():
            if num_tokens := prompt.num_tokens - prompt.num_shared:
                # Each member needs its own copy of the page in which the prompt ends.
                targets = self._pages.tables_SW[slots, len(prompt.pages) - 1]
                self._cache.copy_page(prompt.pages[-1], targets.tolist(), num_tokens)
        logits = [self._prompt_logits[p].expand(len(slots), -1) for p, slots in starting.items()]
        self._sample(torch.cat(logits), [slot for slots in starting.values() for slot in slots])
        for first, *_ in starting.values():
            request_id = self._scheduler.running[first].request.request_id
            if not self._scheduler.still_waiting(request_id):
                self._close_prompt(request_id)
        return True

    def _close_prompt(self, request_id: str) -> None:
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            self._prompt_logits.pop(prompt, None)
            self._pages.close_prompt(prompt)

    def _close_idle_prompts(self) -> bool:
        """Give up prompts that no running member will start from; return whether there are any."""
        starting = {m.request.request_id for m in self._scheduler.running.values() if not m.tokens}
        idle = [request_id for request_id in self._prompts if request_id not in starting]
        for request_id in idle:
            self._close_prompt(request_id)
        return bool(idle)

    def _slots_to_decode(self) -> list[int]:
        """Return the slots whose prefix is computed, each with a page for its next token."""
        running = self._scheduler.running
        ready = [slot for slot in running if slot not in self.prefill.pending_prefill]
        for slot in ready:
            while slot in running and not self._pages.reach(slot, running[slot].num_cached):
                if not self._close_idle_prompts():
                    newest = list(running)[-1]
                    self._scheduler.preempt(newest)
                    self._release(newest)
        return sorted(slot for slot in ready if slot in running)

    def _decode(self, slots: list[int]) -> None:
        running = self._scheduler.running
        num_rows = self.settings.max_num_seqs if self._batch_invariant else len(slots)
        tokens_S, positions_S = np.zeros((2, num_rows), np.int64)
        tables_SW = np.full((num_rows, self._pages.tables_SW.shape[1]), self._idle_page)
        rows = slots if self._batch_invariant else range(num_rows)
        for row, slot in zip(rows, slots, strict=True):
            tokens_S[row], positions_S[row] = running[slot].tokens[-1], running[slot].num_cached
        tables_SW[rows] = self._pages.tables_SW[slots]
        logits_SV = decode(
            self.policy,
            self._cache,
            tokens_S,
            positions_S,
            tables_SW,
            share_pages=not self._batch_invariant,
        )
        self._sample(logits_SV[slots] if self._batch_invariant else logits_SV, slots)

    def _sample(self, logits_SV: Tensor, slots: list[int]) -> None:
        members = [self._scheduler.running[slot] for slot in slots]
        by_distribution: dict[int, list[int]] = {}
        for row, member in enumerate(members):
            by_distribution.setdefault(id(member.distribution), []).append(row)
        for rows in by_distribution.values():
            sequences = [members[row] for row in rows]
            sampling = sequences[0].distribution
            uniforms_S = uniforms(
                [sequence.request.seeds[sequence.index] for sequence in sequences],
                [len(sequence.tokens) for sequence in sequences],
            )
            rows_SV = logits_SV if len(rows) == len(slots) else logits_SV[rows]
            if sampling.depends_on_prefix:
                prompts = [sequence.request.prompt_tokens for sequence in sequences]
                sampled = [np.array(sequence.tokens) for sequence in sequences]
                rows_SV = adjust_logits(rows_SV, sampling, prompts, sampled)
            tokens_S, logprobs_S = sample(rows_SV, uniforms_S.to(logits_SV.device), sampling)
            versions = [self._oldest_versions[slots[row]] for row in rows]
            for sequence, token, logprob, version in zip(
                sequences, tokens_S.tolist(), logprobs_S.tolist(), versions, strict=True
            ):
                sequence.append(token, logprob, version)

    @torch.inference_mode()
    def _switch_weights(self) -> None:
        assert self._pending is not None
        tensors, self.version = self._pending
        self._pending = None
        assign_tensors(self.policy, tensors)
        pack_linear_layers(self.policy, num_rows=self.settings.max_num_seqs)
        self._close_idle_prompts()
        for prompt in self._prompts.values():
            prompt.num_computed = 0
        running = self._scheduler.running
        if self.settings.interruption == "interrupt":
            started = [slot for slot, member in running.items() if member.tokens]
            self._pages.forget_computed(started)
            self.prefill.pending_prefill |= dict.fromkeys(started)
        for slot, member in running.items():
            if self.settings.interruption == "interrupt" or not member.tokens:
                self._oldest_versions[slot] = self.version


def _room(policy: Any, page_tokens: int) -> float:
    """Return the number of pages that fit into a GPU; a CPU's memory is taken page by page."""
    if policy.device.type != "cuda":
        return math.inf
    free_bytes, _ = torch.cuda.mem_get_info(policy.device)
    page_bytes = page_tokens * cached_numbers(policy.config.get_text_config())
    return float(CACHE_SHARE * free_bytes // (page_bytes * policy.dtype.itemsize))


async def start_torch_engine(
    model: Path, settings: GenerationSettings, reader: WeightsReader
) -> ThreadedEngine:
    return ThreadedEngine(await asyncio.to_thread(_load_core, model, settings, reader))


def _load_core(model: Path, settings: GenerationSettings, reader: WeightsReader) -> TorchEngine:
    version = reader.newest()
    weights = reader.load(version).items()
    # New versions are copied into these tensors, which must not be the reader's.
    copies = {name: tensor.to(settings.device, copy=True) for name, tensor in weights}
    policy = policy_with(model, copies, dtype=settings.dtype).to(settings.device)
    tokenizer = tokenizer_of(model)  # a call may have stop strings of its own
    return TorchEngine(policy, settings, version=version, tokenizer=tokenizer)
