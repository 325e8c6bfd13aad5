"""Decides which sequence holds which pages of a fixed memory, and counts their computed tokens.

The members of a group share the full pages of their prompt; what follows is each member's own. A
page is free again when no sequence holds it. No torch, no threads.

Letters: S slots, W pages of the longest sequence.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_flow.core.errors import EngineError

CACHE_SHARE = 0.5
"""Share of memory for keys and values: of a machine for all generators, of a GPU for its own."""


class PagePool:
    """Pages `0 .. num_pages - 1` and how many hold each; the lowest free page is taken first."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise EngineError(f"expected {count} free pages, found {len(self._free)}")
        pages = [heapq.heappop(self._free) for _ in range(count)]
        self.share(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            assert self._holders[page] >= 0, "a page was given back twice"
            if not self._holders[page]:
                heapq.heappush(self._free, page)


@dataclass(slots=True, eq=False)
class PromptPages:
    """The pages of a group's prompt; its members copy the last one if it is not full."""

    num_tokens: int
    num_shared: int
    """Number of tokens in full pages."""
    pages: list[int]
    num_computed: int = 0


@dataclass(slots=True, eq=False)
class SlotPages:
    """The pages of one sequence: those shared with its group first, then its own."""

    prompt: PromptPages | None
    """None if the sequence shares no pages."""
    num_pages: int
    num_computed: int
    """Number of prefilled tokens; shared ones count as soon as `prompt` has them."""


class PageTables:
    def __init__(
        self, *, num_pages: int, page_tokens: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.page_tokens = page_tokens
        self.tables_SW = np.zeros((max_num_seqs, -(-max_model_len // page_tokens)), np.int64)
        self.slots: dict[int, SlotPages] = {}
        self._pool = PagePool(num_pages)

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def open_prompt(self, num_tokens: int) -> PromptPages | None:
        num_pages = -(-num_tokens // self.page_tokens)
        if num_pages >= self._pool.num_free:  # a member needs one more
            return None
        num_shared = num_tokens // self.page_tokens * self.page_tokens
        return PromptPages(num_tokens, num_shared, self._pool.take(num_pages))

    def close_prompt(self, prompt: PromptPages) -> None:
        """Release a prompt that no member will start from; running members keep shared pages."""
        self._pool.give_back(prompt.pages)

    def start(self, slot: int, prompt: PromptPages) -> bool:
        if not self._pool.num_free:
            return False
        shared = prompt.pages[: prompt.num_shared // self.page_tokens]
        self._pool.share(shared)
        self._hold(slot, shared + self._pool.take(1))
        self.slots[slot] = SlotPages(prompt, len(shared) + 1, prompt.num_tokens)
        return True

    def resume(self, slot: int, num_tokens: int) -> bool:
        num_pages = -(-num_tokens // self.page_tokens)
        if num_pages > self._pool.num_free:
            return False
        self._hold(slot, self._pool.take(num_pages))
        self.slots[slot] = SlotPages(None, num_pages, 0)
        return True

    def reach(self, slot: int, position: int) -> bool:
        """Make sure that a slot has a page for its next position; return False if none is free."""
        held = self.slots[slot]
        if position < held.num_pages * self.page_tokens:
            return True
        if not self._pool.num_free:
            return False
        (self.tables_SW[slot, held.num_pages],) = self._pool.take(1)
        held.num_pages += 1
        return True

    def release(self, slot: int) -> None:
        held = self.slots.pop(slot)
        self._pool.give_back(self.tables_SW[slot, : held.num_pages].tolist())

    def forget_computed(self, slots: Iterable[int]) -> None:
        """Mark all tokens of these slots, and of the prompts that they share, as not computed."""
        for slot in slots:
            held = self.slots[slot]
            held.num_computed = 0
            if held.prompt is not None:
                held.num_computed, held.prompt.num_computed = held.prompt.num_shared, 0

    def _hold(self, slot: int, pages: list[int]) -> None:
        self.tables_SW[slot, : len(pages)] = pages


def cached_numbers(config: Any) -> int:
    """Return how many numbers a token's keys and values are, in all layers."""
    num_heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_key_values = getattr(config, "num_key_value_heads", None) or num_heads
    return int(2 * config.num_hidden_layers * num_key_values * head_size)
