"""Pages of prompts and slots: shared, taken, given back, never lost."""

from __future__ import annotations

import random

import pytest

from areal_flow.core.errors import EngineError
from areal_flow.rollout.engines.pages import PagePool, PageTables, PromptPages


def tables(num_pages: int) -> PageTables:
    return PageTables(num_pages=num_pages, page_tokens=4, max_num_seqs=8, max_model_len=40)


def open_prompt(pages: PageTables, num_tokens: int) -> PromptPages:
    prompt = pages.open_prompt(num_tokens)
    assert prompt is not None
    return prompt


def test_lowest_free_page_is_taken_and_none_is_given_back_twice() -> None:
    pool = PagePool(4)
    assert pool.take(3) == [0, 1, 2]
    pool.give_back([1])
    assert pool.take(2) == [1, 3]
    with pytest.raises(EngineError, match="expected 1 free pages, found 0"):
        pool.take(1)
    pool.share([2])
    pool.give_back([2])
    assert pool.num_free == 0
    pool.give_back([2])
    assert pool.take(1) == [2]


def test_members_share_whole_pages_of_their_prompt_and_own_what_follows() -> None:
    pages = tables(8)
    prompt = open_prompt(pages, 10)
    assert (prompt.pages, prompt.num_shared) == ([0, 1, 2], 8)
    assert pages.start(0, prompt)
    assert pages.start(1, prompt)
    assert pages.tables_SW[:2, :3].tolist() == [[0, 1, 3], [0, 1, 4]]
    pages.close_prompt(prompt)
    pages.release(0)
    other = open_prompt(pages, 5)
    assert other.pages == [2, 3]
    pages.release(1)
    assert open_prompt(pages, 9).pages == [0, 1, 4]


def test_slot_reaches_as_far_as_there_are_pages() -> None:
    pages = tables(4)
    prompt = open_prompt(pages, 4)
    assert pages.start(0, prompt)
    assert all(pages.reach(0, position) for position in range(4, 16))
    assert pages.tables_SW[0, :4].tolist() == [0, 1, 2, 3]
    assert not pages.reach(0, 16)
    assert not pages.start(1, prompt)
    assert not pages.resume(1, 1)
    pages.release(0)
    assert pages.resume(1, 12)
    assert not pages.resume(2, 1)


def test_prompt_that_would_leave_no_page_for_a_member_waits() -> None:
    pages = tables(3)
    assert pages.open_prompt(9) is None
    assert open_prompt(pages, 8).pages == [0, 1]


def test_new_weights_leave_nothing_computed_of_slots_and_of_what_they_share() -> None:
    pages = tables(9)
    prompt = open_prompt(pages, 6)
    pages.start(0, prompt)
    prompt.num_computed = 6
    pages.resume(1, 5)
    pages.slots[1].num_computed = 5
    pages.forget_computed([0, 1])
    assert [pages.slots[slot].num_computed for slot in (0, 1)] == [4, 0]
    assert prompt.num_computed == 0


def test_random_life_of_slots_and_prompts_gives_every_page_back() -> None:
    rng = random.Random(0)
    pages = tables(24)
    prompts: list[PromptPages] = []
    lengths: dict[int, int] = {}
    for _ in range(3000):
        slot, action = rng.randrange(8), rng.randrange(5)
        if action == 0 and (prompt := pages.open_prompt(rng.randint(1, 12))):
            prompts.append(prompt)
        elif action == 1 and prompts:
            pages.close_prompt(prompts.pop(rng.randrange(len(prompts))))
        elif slot in pages.slots and action == 2:
            pages.release(slot)
        elif slot in pages.slots and lengths[slot] < 40:
            lengths[slot] += pages.reach(slot, lengths[slot])
        elif slot not in pages.slots and prompts:
            prompt = rng.choice(prompts)
            lengths[slot] = prompt.num_tokens
            pages.start(slot, prompt)
        own = [
            pages.tables_SW[s, (h.prompt.num_shared // 4 if h.prompt else 0) : h.num_pages].tolist()
            for s, h in pages.slots.items()
        ]
        held = [page for each in own for page in each]
        assert len(held) == len({*held})
    for slot in list(pages.slots):
        pages.release(slot)
    for prompt in prompts:
        pages.close_prompt(prompt)
    assert open_prompt(pages, 23 * 4).pages == list(range(23))
