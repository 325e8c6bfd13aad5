"""How the losses of tokens become the loss of a minibatch, micro-batch by micro-batch.

The micro-batches' parts add up to the same whatever the packing. Letters: T trained tokens of a
micro-batch, S its sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from areal_flow.algorithms.protocol import MinibatchSize

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def token_mean(losses_T: Tensor, of: MinibatchSize) -> Tensor:
    """Return sum_t l_t / N over the minibatch's N trained tokens: long sequences weigh more."""
    return losses_T.sum() / of.num_tokens


def sequence_mean(losses_T: Tensor, sequence_T: Tensor, of: MinibatchSize) -> Tensor:
    """Return (1 / S) sum_s (1 / |s|) sum_{t in s} l_t, |s| counting the trained tokens of s.

    The objective of GRPO (arXiv 2402.03300, eq. 3): every sequence weighs the same.
    """
    return sequence_means(losses_T, sequence_T).sum() / of.num_sequences


def constant(losses_T: Tensor, of: MinibatchSize, *, num_tokens: int) -> Tensor:
    """Return (1 / S) sum_s sum_{t in s} l_t / C, with C the constant `num_tokens`.

    A sequence's length then changes no token's weight (Dr. GRPO, arXiv 2503.20783, section 3.2).
    """
    return losses_T.sum() / (of.num_sequences * num_tokens)


def sequence_means(values_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Return the mean of each sequence's values, `[S]`."""
    num_sequences = int(sequence_T[-1]) + 1 if sequence_T.numel() else 0
    zeros_S = values_T.new_zeros(num_sequences)
    lengths_S = zeros_S.index_add(0, sequence_T, values_T.new_ones(sequence_T.numel()))
    return zeros_S.index_add(0, sequence_T, values_T) / lengths_S.clamp(min=1)
