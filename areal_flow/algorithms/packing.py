"""Splits sequences into micro-batches by their lengths. Pure Python."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Sequence


def pack_first_fit_decreasing(
    lengths: Sequence[int], *, max_tokens: int, min_micro_batches: int = 1
) -> list[list[int]]:
    """Pack sequences into micro-batches of at most `max_tokens` tokens.

    Longest first. A new micro-batch is opened while there are fewer than `min_micro_batches` or
    when none has room; otherwise the one with the fewest sequences takes the next, ties going to
    the fewest tokens (AReaL, arXiv 2505.24298, Algorithm 1).

    Args:
        lengths: tokens of each sequence, prompt included.
        max_tokens: capacity of a micro-batch, in tokens.
        min_micro_batches: open at least this many, so that ranks can agree on a count.

    Returns:
        Micro-batches in order of opening; every index of `lengths` exactly once.
    """
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if longest_first and lengths[longest_first[0]] > max_tokens:
        raise ValueError(
            f"sequence {longest_first[0]} has {lengths[longest_first[0]]} tokens, a micro-batch "
            f"holds {max_tokens}: raise trainer.tokens_per_micro_batch"
        )
    micro_batches: list[list[int]] = []
    filled: list[tuple[int, int, int]] = []
    """Of each micro-batch how many sequences, their tokens and its number, sorted."""
    for index in longest_first:
        place = len(filled)
        if len(micro_batches) >= min_micro_batches:
            place = _first_with_room(filled, max_tokens - lengths[index])
        if place == len(filled):
            filled.append((0, 0, len(micro_batches)))
            micro_batches.append([])
        num_sequences, num_tokens, number = filled.pop(place)
        micro_batches[number].append(index)
        insort(filled, (num_sequences + 1, num_tokens + lengths[index], number))
    return micro_batches


def _first_with_room(filled: Sequence[tuple[int, int, int]], most_tokens: int) -> int:
    """Look at one of each number of sequences: if the one with fewest tokens is full, all are."""
    place = 0
    while place < len(filled) and filled[place][1] > most_tokens:
        place = bisect(filled, (filled[place][0] + 1,), lo=place)
    return place
