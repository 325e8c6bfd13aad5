"""Micro-batch packing against the paper's goldens and its invariants."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_flow.algorithms.packing import pack_first_fit_decreasing
from areal_flow.training.sequences import deal_by_work, padded


def test_golden_ten_lengths() -> None:
    packed = pack_first_fit_decreasing(range(10, 0, -1), max_tokens=20, min_micro_batches=2)
    assert sorted(sorted(m) for m in packed) == [[0, 3, 7], [1, 2, 8], [4, 5, 6, 9]]


def test_golden_five_lengths() -> None:
    packed = pack_first_fit_decreasing(
        [100, 200, 300, 150, 250], max_tokens=500, min_micro_batches=2
    )
    assert packed == [[2, 3], [4, 1], [0]]


def test_too_long_sequence_is_refused_with_its_setting() -> None:
    with pytest.raises(ValueError, match="tokens_per_micro_batch"):
        pack_first_fit_decreasing([3, 21], max_tokens=20)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=60),
    st.integers(50, 200),
    st.integers(1, 8),
)
def test_every_sequence_once_and_no_overflow(
    lengths: list[int], max_tokens: int, min_micro_batches: int
) -> None:
    packed = pack_first_fit_decreasing(
        lengths, max_tokens=max_tokens, min_micro_batches=min_micro_batches
    )
    assert sorted(index for micro in packed for index in micro) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in micro) <= max_tokens for micro in packed)
    assert len(packed) >= min(min_micro_batches, len(lengths))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_a_new_micro_batch_is_opened_only_when_none_has_room(lengths: list[int]) -> None:
    packed = pack_first_fit_decreasing(lengths, max_tokens=50)
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    opened_by = {micro[0] for micro in packed}
    filled: dict[int, int] = {}
    home = {index: m for m, micro in enumerate(packed) for index in micro}
    for index in order:
        if index in opened_by:
            assert all(tokens + lengths[index] > 50 for tokens in filled.values())
        filled[home[index]] = filled.get(home[index], 0) + lengths[index]


@given(st.integers(1, 8), st.integers(1, 12), st.randoms(use_true_random=False))
def test_ranks_get_as_many_micro_batches_and_about_as_much_work(
    num_ranks: int, each: int, random: Random
) -> None:
    work = [random.randint(1, 1000) for _ in range(num_ranks * each)]
    ranks = deal_by_work(work, num_ranks)
    assert sorted(ranks) == sorted([*range(num_ranks)] * each)
    of_ranks = [
        sum(w for w, rank in zip(work, ranks, strict=True) if rank == r) for r in range(num_ranks)
    ]
    assert max(of_ranks) - min(of_ranks) <= max(work)


def test_long_sequences_are_dealt_to_all_ranks() -> None:
    work = [100, 90, 80, 70, 2, 2, 1, 1]
    ranks = deal_by_work(work, 2)
    assert ranks == [0, 1, 1, 0, 0, 1, 1, 0]


@given(st.integers(0, 100_000))
def test_padding_is_small_and_numbers_of_rows_are_few(num_rows: int) -> None:
    num_padded = padded(num_rows)
    assert num_rows <= num_padded <= num_rows + max(63, num_rows / 32)
    assert len({padded(num) for num in range(4096, 8192)}) <= 33
