"""Splits the sequences of a step into minibatches, ranks' batches and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from areal_flow.algorithms.packing import pack_first_fit_decreasing
from areal_flow.training.sequences import TrainingSequence, row_tokens
from areal_flow.training.updates import MinibatchPlan, StepSettings

ATTENTION_BREAK_EVEN_TOKENS = 4096
"""Where attention is about as much work as everything else, for a policy some 700 wide."""

MIN_SHARED_FRACTION = 0.1
"""Share of a minibatch's tokens that prompts in common must save."""


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
            units = units_of(sequences, members, num_ranks, max_tokens)
        plan.append(_plan_minibatch(sequences, units, num_ranks, max_tokens))
    return plan


def plan_passes(
    sequences: Sequence[TrainingSequence], *, max_tokens: int, num_ranks: int
) -> MinibatchPlan:
    units = units_of(sequences, range(len(sequences)), num_ranks, max_tokens)
    return _plan_minibatch(sequences, units, num_ranks, max_tokens)


def units_of(
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
    num_passes = max(len(of_rank) for of_rank in dealt)
    return [[*of_rank, *[[]] * (num_passes - len(of_rank))] for of_rank in dealt]


def deal_by_work(work: Sequence[int], num_ranks: int) -> list[int]:
    """Return a rank for each micro-batch: as many for each, and about as much work.

    The most work first, to the ranks in turn and then in turn backwards.

    Args:
        work: of each micro-batch; their number is a multiple of `num_ranks`.
    """
    turns = [*range(num_ranks), *reversed(range(num_ranks))]
    ranks = [0] * len(work)
    most_first = sorted(range(len(work)), key=lambda micro: (-work[micro], micro))
    for turn, micro in enumerate(most_first):
        ranks[micro] = turns[turn % len(turns)]
    return ranks


def _work(sequences: Sequence[TrainingSequence]) -> int:
    """Return a row's work: of its tokens' layers, and of each sequence's attention."""
    return row_tokens(sequences) * ATTENTION_BREAK_EVEN_TOKENS + sum(
        s.num_tokens**2 for s in sequences
    )
