"""Stored trajectories in, aligned training tensors out: the one place where the shift happens.

A position predicts the token after it. For a sequence of P prompt and C completion tokens packed at
offset o, completion token j is predicted at position o + P - 1 + j; its behaviour log-probability,
its mask and its advantage sit at index j of the stored columns.

Letters: T packed tokens, M trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal_flow.algorithms.staleness import trainable_mask
from areal_flow.models.attention import PackedLayout
from areal_flow.types import VersionSpan


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One trajectory, with the tokens that may carry gradient."""

    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    behavior_logprobs: Sequence[float]
    trained: Sequence[bool]
    reward: float
    group: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_tokens) + len(self.output_tokens)

    @property
    def num_trained(self) -> int:
        return sum(self.trained)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences in one row, and what to compute at the trained positions."""

    input_ids_1T: Tensor
    layout: PackedLayout
    predicting_M: Tensor
    """Positions in the row whose next token is trained."""
    targets_M: Tensor
    behavior_logprobs_M: Tensor
    advantages_M: Tensor


def pack_sequences(
    sequences: Sequence[TrainingSequence],
    advantages: Sequence[float],
    *,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Lay sequences side by side and align everything that belongs to their trained tokens."""
    input_ids: list[int] = []
    predicting: list[int] = []
    targets: list[int] = []
    behavior: list[float] = []
    advantage_per_token: list[float] = []
    for sequence, advantage in zip(sequences, advantages, strict=True):
        first_prediction = len(input_ids) + len(sequence.prompt_tokens) - 1
        for offset, trained in enumerate(sequence.trained):
            if trained:
                predicting.append(first_prediction + offset)
                targets.append(sequence.output_tokens[offset])
                behavior.append(sequence.behavior_logprobs[offset])
                advantage_per_token.append(advantage)
        input_ids.extend(sequence.prompt_tokens)
        input_ids.extend(sequence.output_tokens)
    return MicroBatch(
        input_ids_1T=torch.tensor([input_ids], device=device),
        layout=PackedLayout([sequence.num_tokens for sequence in sequences], device),
        predicting_M=torch.tensor(predicting, dtype=torch.long, device=device),
        targets_M=torch.tensor(targets, dtype=torch.long, device=device),
        behavior_logprobs_M=torch.tensor(behavior, dtype=torch.float32, device=device),
        advantages_M=torch.tensor(advantage_per_token, dtype=torch.float32, device=device),
    )


def sequences_from_rows(
    rows: Sequence[Mapping[str, Any]], *, policy_version: int, max_staleness: int
) -> list[TrainingSequence]:
    """Turn trajectory rows into sequences; a token older than `max_staleness` is context only."""
    return [
        TrainingSequence(
            prompt_tokens=row["prompt_tokens"],
            output_tokens=row["output_tokens"],
            behavior_logprobs=row["behavior_logprobs"],
            trained=[
                fresh and chosen
                for fresh, chosen in zip(
                    trainable_mask(
                        spans_of_row(row),
                        policy_version=policy_version,
                        max_staleness=max_staleness,
                    ),
                    row["loss_mask"],
                    strict=True,
                )
            ],
            reward=row["reward"],
            group=row["submission_index"],
        )
        for row in rows
    ]


def spans_of_row(row: Mapping[str, Any]) -> list[VersionSpan]:
    """Return a trajectory row's version spans."""
    return [VersionSpan(span["version"], span["length"]) for span in row["version_spans"]]


def masked_fraction_by_tenth(masks: Sequence[Sequence[bool]]) -> tuple[float, ...]:
    """Return the share of masked tokens in each tenth of the completions, by relative position."""
    masked, total = [0] * 10, [0] * 10
    for mask in masks:
        for position, trained in enumerate(mask):
            tenth = position * 10 // len(mask)
            total[tenth] += 1
            masked[tenth] += not trained
    return tuple(m / t if t else 0.0 for m, t in zip(masked, total, strict=True))
