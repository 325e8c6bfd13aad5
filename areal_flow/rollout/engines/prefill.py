"""Which tokens of prompts and prefixes are computed next: in chunks, under a budget of tokens.

A group's prompt is computed once, for all of its members; what follows its whole pages is
computed once for all members that lack it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from areal_flow.policy.models.paged_prefill import Chunk, Pages
from areal_flow.rollout.engines.pages import PageTables, PromptPages, SlotPages
from areal_flow.rollout.engines.scheduler import SampledSequence

TOKENS_A_STEP = 8192
"""So many tokens of prompts and prefixes delay the next token of those that decode, at most."""

CPU_TOKENS_A_PASS = 2048
"""More in one pass on a CPU is a fifth slower: activations no longer fit its caches."""

_Planned = tuple[Chunk, PromptPages | SlotPages]
"""A chunk, and the prompt or the slot that it is a part of."""


class PrefillPlan:
    """The slots whose prompt or prefix is not computed yet, and the chunks that they need."""

    def __init__(
        self,
        running: Mapping[int, SampledSequence],
        pages: PageTables,
        *,
        tokens_a_pass: float,
        alone: bool,
    ) -> None:
        self.tokens_a_step = TOKENS_A_STEP
        self.pending_prefill: dict[int, None] = {}
        """Slots, in the order of their turn."""
        self._running = running
        self._pages = pages
        self._tokens_a_pass = tokens_a_pass
        self._alone = alone

    def passes(self) -> Iterator[list[_Planned]]:
        """Yield chunks that are computed together; they count as computed from then on."""
        together: list[_Planned] = []
        num_tokens = 0
        for each in self._chunks():
            num_tokens += len(each[0].tokens)
            if together and (self._alone or num_tokens > self._tokens_a_pass):
                yield together
                together, num_tokens = [], len(each[0].tokens)
            together.append(each)
        if together:
            yield together

    def _chunks(self) -> Iterator[_Planned]:
        """Yield chunks, prompts' before members' own, as far as the budget of a step goes."""
        left = self.tokens_a_step
        for slot in list(self.pending_prefill):
            member = self._running[slot]
            for part, pages, needed, sharing in self._parts(slot, member):
                end = min(needed, part.num_computed + left)
                if part.num_computed < end:
                    tokens = member.prefix(part.num_computed, end)
                    copies = [self._pages.tables_SW[other] for other in sharing]
                    yield Chunk(tokens, part.num_computed, pages, copies), part
                    left -= 0 if self._alone else len(tokens)
                    part.num_computed = end
                    for other in sharing:
                        self._pages.slots[other].num_computed = end
                if part.num_computed < needed:
                    break
            else:
                del self.pending_prefill[slot]

    def _parts(
        self, slot: int, member: SampledSequence
    ) -> Iterator[tuple[PromptPages | SlotPages, Pages, int, Sequence[int]]]:
        """Yield what holds a member's prefix, its pages, how far it must be computed, and the other
        slots that it is computed for as well."""
        held, pages = self._pages.slots[slot], self._pages.tables_SW[slot]
        if held.prompt is not None:
            prompt = held.prompt
            needed = prompt.num_shared if member.tokens else prompt.num_tokens
            yield prompt, np.array(prompt.pages), needed, ()
            if held.num_computed < prompt.num_tokens and not self._alone:
                sharing = [
                    other for other in self.pending_prefill if self._same_prefix(other, slot)
                ]
                yield held, pages, prompt.num_tokens, sharing
        yield held, pages, member.num_cached, ()

    def _same_prefix(self, other: int, slot: int) -> bool:
        held, of_other = self._pages.slots[slot], self._pages.slots[other]
        prefix = (held.prompt, held.num_computed)
        return other != slot and (of_other.prompt, of_other.num_computed) == prefix
