"""Splits sequences into micro-batches by their lengths. Pure Python."""

from __future__ import annotations

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

    Raises:
        ValueError: a sequence alone exceeds `max_tokens`.
    """
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    micro_batches: list[list[int]] = []
    num_tokens: list[int] = []
    for index in longest_first:
        length = lengths[index]
        if length > max_tokens:
            raise ValueError(
                f"sequence {index} has {length} tokens, a micro-batch holds {max_tokens}: "
                "raise trainer.tokens_per_micro_batch"
            )
        fitting = [m for m, tokens in enumerate(num_tokens) if tokens + length <= max_tokens]
        if len(micro_batches) < min_micro_batches or not fitting:
            micro_batches.append([index])
            num_tokens.append(length)
            continue
        chosen = min(fitting, key=lambda m: (len(micro_batches[m]), num_tokens[m]))
        micro_batches[chosen].append(index)
        num_tokens[chosen] += length
    return micro_batches
