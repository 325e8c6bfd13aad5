"""Splits sequences into micro-batches by their lengths. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush


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
    open_ones = OpenMicroBatches(max_tokens, min(lengths, default=0))
    for index in longest_first:
        enough = len(micro_batches) >= min_micro_batches
        chosen = open_ones.with_room(lengths[index]) if enough else None
        if chosen is None:
            chosen = 0, len(micro_batches)
            micro_batches.append([])
        num_tokens, number = chosen
        micro_batches[number].append(index)
        open_ones.add(len(micro_batches[number]), num_tokens + lengths[index], number)
    return micro_batches


class OpenMicroBatches:
    """Micro-batches by their numbers of sequences, and those of a number by their tokens.

    Of as many sequences only the one with the fewest tokens may be chosen: if it has no room, no
    other has. So a choice looks at one micro-batch for each number of sequences.
    """

    def __init__(self, max_tokens: int, shortest: int) -> None:
        self._max_tokens = max_tokens
        self._shortest = shortest
        self._by_size: list[list[tuple[int, int]]] = [[]]
        self._smallest = 0
        """Those with fewer sequences have no room for any."""

    def add(self, num_sequences: int, num_tokens: int, number: int) -> None:
        """Offer a micro-batch with one sequence more than before."""
        if num_sequences == len(self._by_size):
            self._by_size.append([])
        heappush(self._by_size[num_sequences], (num_tokens, number))
        self._smallest = min(self._smallest, num_sequences)

    def with_room(self, length: int) -> tuple[int, int] | None:
        """Take out the one to choose for a sequence; return its tokens and its number."""
        while self._smallest < len(self._by_size) and not self._has_room(
            self._smallest, self._shortest
        ):
            self._smallest += 1
        for size in range(self._smallest, len(self._by_size)):
            if self._has_room(size, length):
                return heappop(self._by_size[size])
        return None

    def _has_room(self, size: int, length: int) -> bool:
        heap = self._by_size[size]
        return bool(heap) and heap[0][0] + length <= self._max_tokens
