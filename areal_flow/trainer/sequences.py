"""How stored trajectories become aligned training tensors: the one place where the shift happens.

A position predicts the token after it. For a sequence of P prompt and C completion tokens packed at
offset o, completion token j is predicted at position o + P - 1 + j; its behaviour log-probability,
its mask and its advantage sit at index j of the stored columns.

Letters: T packed tokens, M trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_flow.algorithms.protocol import Advantage
from areal_flow.algorithms.staleness import trained_mask
from areal_flow.models.attention import PackedLayout


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One trajectory, with the tokens that may carry gradient."""

    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    behavior_logprobs: Sequence[float]
    trained: Sequence[bool]
    reward: float
    group: int
    versions: Sequence[int] = ()
    """Policy version that sampled each completion token; empty where no policy did."""
    advantage: Advantage = 0.0

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
    sequence_M: Tensor
    """Index of each trained token's sequence in the row, ascending."""
    versions_M: Tensor
    """Policy version that sampled each trained token; -1 where no policy did."""
    proximal_logprobs_M: Tensor | None = None
    """None where the loss's own forward pass serves: before the first update of a step."""


def pack_sequences(
    sequences: Sequence[TrainingSequence], *, device: torch.device | str = "cpu"
) -> MicroBatch:
    """Lay sequences side by side and align everything that belongs to their trained tokens."""
    num_outputs = [len(sequence.output_tokens) for sequence in sequences]
    trained = np.concatenate([np.asarray(sequence.trained, bool) for sequence in sequences])
    is_output_T = np.concatenate(
        [np.arange(s.num_tokens) >= len(s.prompt_tokens) for s in sequences]
    )

    def column(values: Iterable[Any], dtype: type[np.generic]) -> Tensor:
        """Return trained tokens' values; a sequence has one for each of its tokens or for all."""
        by_token = [
            np.broadcast_to(np.asarray(value, dtype), num)
            for value, num in zip(values, num_outputs, strict=True)
        ]
        return torch.from_numpy(np.concatenate(by_token)[trained]).to(device)

    row = list(chain.from_iterable(chain(s.prompt_tokens, s.output_tokens) for s in sequences))
    return MicroBatch(
        input_ids_1T=torch.tensor([row], device=device),
        layout=PackedLayout([sequence.num_tokens for sequence in sequences], device),
        predicting_M=torch.from_numpy(np.flatnonzero(is_output_T)[trained] - 1).to(device),
        targets_M=column((s.output_tokens for s in sequences), np.int64),
        behavior_logprobs_M=column((s.behavior_logprobs for s in sequences), np.float32),
        advantages_M=column((s.advantage for s in sequences), np.float32),
        sequence_M=column(range(len(sequences)), np.int64),
        versions_M=column((s.versions or -1 for s in sequences), np.int64),
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
            trained=trained_mask(
                versions := token_versions(row),
                row["loss_mask"],
                policy_version=policy_version,
                max_staleness=max_staleness,
            ),
            reward=row["reward"],
            group=row["submission_index"],
            versions=versions,
        )
        for row in rows
    ]


def token_versions(row: Mapping[str, Any]) -> list[int]:
    """Return the policy version that sampled each token of a trajectory row."""
    return [span["version"] for span in row["version_spans"] for _ in range(span["length"])]


def masked_fraction_by_tenth(masks: Sequence[Sequence[bool]]) -> tuple[float, ...]:
    """Return the share of masked tokens in each tenth of the completions, by relative position."""
    masked, total = np.zeros(10), np.zeros(10)
    for mask in masks:
        tenths = np.arange(len(mask)) * 10 // max(1, len(mask))
        total += np.bincount(tenths, minlength=10)
        masked += np.bincount(tenths, ~np.asarray(mask, bool), minlength=10)
    return tuple((masked / np.maximum(total, 1)).tolist())
