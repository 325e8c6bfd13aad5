"""How stored trajectories become micro-batches: sequences, aligned tensors, and a step's plan.

A position predicts the token after it; no other module shifts. Of a sequence of P prompt and C
completion tokens, completion token j is predicted where the sequence's token P - 1 + j is in the
row; its behaviour log-probability, mask and advantage are at index j of the stored columns.

Letters: T packed tokens, M trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_flow.algorithms.packing import pack_first_fit_decreasing
from areal_flow.algorithms.protocol import Advantage
from areal_flow.algorithms.staleness import trained_mask
from areal_flow.core.types import Logprobs, Tokens, VersionSpan
from areal_flow.policy.models.attention import RowLayout, to_device
from areal_flow.policy.models.packed_layout import PackedLayout
from areal_flow.training.settings import StepSettings


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSequence:
    prompt_tokens: Tokens
    output_tokens: Tokens
    behavior_logprobs: Logprobs
    trained: NDArray[np.bool_]
    reward: float
    group: int
    version_spans: Sequence[VersionSpan] = ()
    """Policy versions that sampled the completion; empty where no policy did."""
    advantage: Advantage = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_tokens) + len(self.output_tokens)

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.trained))

    def trained_spans(self) -> tuple[VersionSpan, ...]:
        ends = accumulate(span.length for span in self.version_spans)
        return tuple(
            VersionSpan(version, int(np.count_nonzero(self.trained[end - length : end])))
            for (version, length), end in zip(self.version_spans, ends, strict=True)
        )


MinibatchPlan = list[list[list[int]]]
"""The sequences of one minibatch by rank and micro-batch, as indices."""

PAD_MULTIPLE = 64

MAX_CACHED_TOKENS = 2**21
"""Maximum tokens of a minibatch that stays on the GPU between passes: some 200 MB."""

ATTENTION_BREAK_EVEN_TOKENS = 4096
"""Where attention is about as much work as everything else, for a policy some 700 wide."""

MIN_SHARED_FRACTION = 0.1
"""Share of a minibatch's tokens that prompts in common must save."""

_EMPTY_SEQUENCE = TrainingSequence(
    np.zeros(1, np.int64),
    np.zeros(0, np.int64),
    np.zeros(0, np.float32),
    np.zeros(0, np.bool_),
    0.0,
    0,
)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    input_ids_1T: Tensor
    layout: RowLayout
    predicting_M: Tensor
    """Positions in the row of what predicts each trained token."""
    predicting: NDArray[np.int64]
    """The same in main memory."""
    trained_M: Tensor
    """Positions in the row of the trained tokens."""
    targets_M: Tensor
    behavior_logprobs_M: Tensor
    advantages_M: Tensor
    sequence_M: Tensor
    """Index of each trained token's sequence in the row, ascending."""
    versions_M: Tensor
    """Policy version that sampled each trained token; -1 where no policy did."""
    num_sequences: int
    """Of the row, up to the last one with a trained token."""
    proximal_logprobs_M: Tensor | None = None
    """None before the first update of a step: the loss's own forward pass has them."""
    batch_index_S: Tensor | None = None
    """Of each sequence of the row: its index in the batch."""
    top_Mk: Tensor | None = None
    """The reference's k likeliest tokens in place of each trained one, if needed."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatches(Sequence[MicroBatch]):
    """Micro-batches, each packed on access: tensors take seven times the memory of their rows.

    On a device other than the CPU a minibatch's are kept for its next pass, unless they are large.
    """

    sequences: Sequence[TrainingSequence]
    packed: Sequence[Sequence[int]]
    """Indices of each micro-batch's sequences."""
    device: torch.device | str = "cpu"
    proximal_logprobs: Sequence[Tensor] | None = None
    kept: dict[int, MicroBatch] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, index: Any) -> Any:
        if (micro := self.kept.get(index)) is None:
            row = [self.sequences[i] for i in self.packed[index]]
            micro = replace(
                pack_sequences(row, device=self.device),
                batch_index_S=to_device(np.array(self.packed[index], np.int64), self.device),
            )
            if self._keeps:
                self.kept[index] = micro
        if self.proximal_logprobs is None:
            return micro
        return replace(micro, proximal_logprobs_M=self.proximal_logprobs[index])

    @property
    def _keeps(self) -> bool:
        if torch.device(self.device).type == "cpu":
            return False
        num_tokens = sum(self.sequences[i].num_tokens for row in self.packed for i in row)
        return num_tokens <= MAX_CACHED_TOKENS


def pack_sequences(
    sequences: Sequence[TrainingSequence], *, device: torch.device | str = "cpu"
) -> MicroBatch:
    """Lay sequences side by side and align everything that belongs to their trained tokens.

    Those with the same prompt share it: its tokens are in the row once. Without any sequence, the
    row is one token that nothing is trained on.
    """
    sequences = sequences or [_EMPTY_SEQUENCE]
    tokens, places = _side_by_side(sequences)
    trained_M = np.flatnonzero(np.concatenate([s.trained for s in sequences]))
    sequence_M = np.repeat(np.arange(len(sequences)), [s.num_trained for s in sequences])
    num_prompt_tokens = np.cumsum([len(s.prompt_tokens) for s in sequences])
    positions, at_M = np.concatenate(places), trained_M + num_prompt_tokens[sequence_M]
    span_lists = [s.version_spans or [VersionSpan(-1, len(s.output_tokens))] for s in sequences]
    spans = np.array([*chain.from_iterable(span_lists)], np.int64)

    def column(by_token: Sequence[NDArray[Any]], dtype: type[np.generic]) -> Tensor:
        return tensor(np.concatenate(by_token)[trained_M].astype(dtype, copy=False))

    tensor = partial(to_device, device=device)
    return MicroBatch(
        input_ids_1T=tensor(np.concatenate(tokens, dtype=np.int64)[None]),
        layout=PackedLayout([len(each) for each in places], device, places=places),
        predicting_M=tensor(predicting_M := positions[at_M - 1]),
        predicting=predicting_M,
        trained_M=tensor(positions[at_M]),
        targets_M=column([s.output_tokens for s in sequences], np.int64),
        behavior_logprobs_M=column([s.behavior_logprobs for s in sequences], np.float32),
        advantages_M=column(
            [np.full(len(s.trained), s.advantage, np.float32) for s in sequences], np.float32
        ),
        sequence_M=tensor(sequence_M),
        versions_M=tensor(np.repeat(spans[:, 0], spans[:, 1])[trained_M]),
        num_sequences=int(sequence_M.max(initial=-1)) + 1,
    )


def row_tokens(sequences: Sequence[TrainingSequence]) -> int:
    """Return a row's tokens without padding; a shared prompt counts once."""
    prompts = {s.prompt_tokens.tobytes(): len(s.prompt_tokens) for s in sequences}
    return sum(prompts.values()) + sum(len(s.output_tokens) for s in sequences)


def padded(num_rows: int) -> int:
    """Return a number of rows for matrices of so many or a little less, a thirty-second at most.

    Libraries prepare for each size that they see: there are 32 from one power of two to the next.
    """
    multiple = max(PAD_MULTIPLE, 1 << max(0, num_rows.bit_length() - 6))
    return -(-num_rows // multiple) * multiple


def _side_by_side(
    sequences: Sequence[TrainingSequence],
) -> tuple[list[Tokens], list[NDArray[np.int64]]]:
    """Return the parts of a row, and where each sequence's tokens lie in it, padding's at the end.

    Padding is sequences, too, none longer than all others: some policies have no later positions,
    and some compute every token otherwise where there are any. A sequence alone has none.
    """
    parts: list[Tokens] = []
    places: list[NDArray[np.int64]] = []
    prompts: dict[bytes, NDArray[np.int64]] = {}
    end = 0
    for sequence in sequences:
        key = sequence.prompt_tokens.tobytes()
        if key not in prompts:
            prompts[key] = np.arange(end, end + len(sequence.prompt_tokens))
            parts.append(sequence.prompt_tokens)
            end += len(sequence.prompt_tokens)
        parts.append(sequence.output_tokens)
        output = np.arange(end, end + len(sequence.output_tokens))
        places.append(np.concatenate([prompts[key], output]))
        end += len(output)
    if len(sequences) > 1 and (num_padding := padded(end) - end):
        parts.append(np.zeros(num_padding, np.int64))
        longest, padding = max(map(len, places)), np.arange(end, end + num_padding)
        places += [padding[at : at + longest] for at in range(0, num_padding, longest)]
    return parts, places


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
                row["version_spans"],
                row["loss_mask"],
                policy_version=policy_version,
                max_staleness=max_staleness,
            ),
            reward=row["reward"],
            group=row["submission_index"],
            version_spans=row["version_spans"],
        )
        for row in rows
    ]


def plan_micro_batches(
    sequences: Sequence[TrainingSequence],
    *,
    step: int,
    settings: StepSettings,
    max_tokens: int,
    num_ranks: int = 1,
) -> list[MinibatchPlan]:
    """Return each minibatch's plan; (seed, step) draw the order of groups.

    A group belongs to one minibatch: its members' advantages are relative to each other, and only
    in one update do they add up to what they say.
    """
    groups = sorted({sequence.group for sequence in sequences})
    order = np.random.default_rng([settings.seed, step]).permutation(groups)
    plan = []
    for part in np.array_split(order, settings.algorithm.num_minibatches):
        chosen = set(part.tolist())
        members = [index for index, s in enumerate(sequences) if s.group in chosen]
        if settings.packs_groups:
            units = [[*of] for _, of in groupby(members, key=lambda index: sequences[index].group)]
        else:
            units = group_by_prompt(sequences, members, num_ranks, max_tokens)
        plan.append(_plan_minibatch(sequences, units, num_ranks, max_tokens))
    return plan


def plan_passes(
    sequences: Sequence[TrainingSequence], *, max_tokens: int, num_ranks: int
) -> MinibatchPlan:
    units = group_by_prompt(sequences, range(len(sequences)), num_ranks, max_tokens)
    return _plan_minibatch(sequences, units, num_ranks, max_tokens)


def group_by_prompt(
    sequences: Sequence[TrainingSequence], members: Sequence[int], num_ranks: int, max_tokens: int
) -> list[list[int]]:
    """Return which sequences of a minibatch stay together, to share their prompt in one row.

    Each is alone if sharing saves few tokens, because single ones fill micro-batches better. Ranks
    need parts that can be dealt evenly: a quarter of what each gets, or one sequence.
    """
    lengths = {member: sequences[member].num_tokens for member in members}
    num_tokens = sum(lengths.values())
    if num_ranks > 1:
        part = num_tokens // (4 * num_ranks)
        max_tokens = min(max_tokens, max([part, *lengths.values()]))
    companions: dict[bytes, list[int]] = {}
    for member in members:
        companions.setdefault(sequences[member].prompt_tokens.tobytes(), []).append(member)
    together = [
        [of[index] for index in indices]
        for of in companions.values()
        for indices in pack_first_fit_decreasing([lengths[m] for m in of], max_tokens=max_tokens)
    ]
    saved = sum((len(unit) - 1) * len(sequences[unit[0]].prompt_tokens) for unit in together)
    shares = saved > MIN_SHARED_FRACTION * num_tokens
    return together if shares else [[member] for member in members]


def _plan_minibatch(
    sequences: Sequence[TrainingSequence],
    units: Sequence[Sequence[int]],
    num_ranks: int,
    max_tokens: int,
) -> MinibatchPlan:
    lengths = [sum(sequences[member].num_tokens for member in unit) for unit in units]
    packed = pack_first_fit_decreasing(lengths, max_tokens=max_tokens)
    if missing := -len(packed) % num_ranks:
        packed = pack_first_fit_decreasing(
            lengths, max_tokens=max_tokens, min_micro_batches=len(packed) + missing
        )
    micro_batches = [[member for index in indices for member in units[index]] for indices in packed]
    work = [_work([sequences[member] for member in micro]) for micro in micro_batches]
    dealt: MinibatchPlan = [[] for _ in range(num_ranks)]
    for micro, rank in zip(micro_batches, deal_by_work(work, num_ranks), strict=True):
        dealt[rank].append(micro)
    # Ranks whose parts of the policy belong together make as many passes each, some of no sequence.
    num_passes = max(len(part) for part in dealt)
    return [[*part, *[[]] * (num_passes - len(part))] for part in dealt]


def deal_by_work(work: Sequence[int], num_ranks: int) -> list[int]:
    """Assign micro-batches to ranks: equally many each, and about equal work.

    The heaviest first, to the ranks in turn and then in reverse turn.

    Args:
        work: of each micro-batch; their number is a multiple of `num_ranks`.
    """
    turns = [*range(num_ranks), *reversed(range(num_ranks))]
    ranks = [0] * len(work)
    heaviest_first = sorted(range(len(work)), key=lambda micro: (-work[micro], micro))
    for turn, micro in enumerate(heaviest_first):
        ranks[micro] = turns[turn % len(turns)]
    return ranks


def _work(sequences: Sequence[TrainingSequence]) -> int:
    """Estimate a row's work: layers by token, attention by sequence."""
    return row_tokens(sequences) * ATTENTION_BREAK_EVEN_TOKENS + sum(
        s.num_tokens**2 for s in sequences
    )
