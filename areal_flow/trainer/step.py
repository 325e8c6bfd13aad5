"""One training step: advantages over the whole batch, then one optimizer update a minibatch.

Minibatches are packed into micro-batches whose gradients add up. A loss is divided by the size of
its minibatch, so neither the packing nor the number of ranks changes the gradient.

It does not depend on where sequences come from, where weights go, or what holds the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, groupby

import numpy as np
import torch

from areal_flow.algorithms.composed import ComposedAlgorithm
from areal_flow.algorithms.learning_rates import scheduled_rate
from areal_flow.algorithms.packing import pack_first_fit_decreasing
from areal_flow.algorithms.protocol import (
    Advantage,
    AdvantageInputs,
    Metric,
    MinibatchSize,
    add_metrics,
    mean,
)
from areal_flow.config import TrainerSettings
from areal_flow.step_metrics import SKIPPED_UPDATES
from areal_flow.trainer.backend import TrainerBackend
from areal_flow.trainer.critic import Critic
from areal_flow.trainer.passes import by_trajectory
from areal_flow.trainer.sequences import MicroBatch, MicroBatches, TrainingSequence, row_tokens
from areal_flow.trainer.updates import Minibatch, StepSettings, UpdateNumbers

ATTENTION_BREAK_EVEN_TOKENS = 4096
"""Where attention is about as much work as everything else, for a policy some 700 wide."""

MIN_SHARED_FRACTION = 0.1
"""Share of a minibatch's tokens that prompts in common must save."""

MinibatchPlan = list[list[list[int]]]
"""Of one minibatch: the indices of the sequences of each rank's micro-batches."""


def train_step(
    backend: TrainerBackend,
    sequences: Sequence[TrainingSequence],
    *,
    step: int,
    settings: StepSettings,
    rate: float | None = None,
) -> UpdateNumbers:
    """Update the policy once per minibatch; deterministic in (policy, sequences, step, settings).

    After `TrainerLost` (another rank was lost) the backend must not be used any more.

    Args:
        sequences: the whole batch, on every rank.
        rate: of learning; without one, that of the backend's settings.
    """
    rate = learning_rate(backend.settings, step) if rate is None else rate
    max_tokens = backend.settings.tokens_per_micro_batch
    plan = plan_micro_batches(sequences, step=step, settings=settings, max_tokens=max_tokens)
    inputs = advantage_inputs(sequences)
    critic = backend.critic if settings.algorithm.needs_critic else None
    if settings.algorithm.needs_kl:
        inputs = replace(inputs, kl_N=divergences(backend, sequences, settings))
    if critic:
        values_BL = critic.values(sequences, plan_passes(sequences, settings, max_tokens), settings)
        inputs = replace(inputs, values_BL=values_BL)
    advantages = list(settings.algorithm.advantages(inputs))
    weighted = [replace(s, advantage=a) for s, a in zip(sequences, advantages, strict=True)]
    minibatches: list[Minibatch] = []
    for planned in plan:
        batches = _batches(weighted, planned, backend, settings)
        if minibatches and settings.needs_proximal:  # before any update: of the policy before it
            batches = {rank: _with_proximal(backend, b, settings) for rank, b in batches.items()}
        minibatches.append(Minibatch(batches, _size(sequences, planned), rate, settings, step - 1))
    numbers = UpdateNumbers(metrics=advantage_moments(weighted), advantages=advantages)
    if inputs.kl_N is not None:
        numbers.metrics["kl_policy_reference"] = mean(inputs.kl_N)
    minibatches = [minibatch for minibatch in minibatches if minibatch.size.num_tokens]
    for minibatch in minibatches:
        found = backend.update(minibatch)
        numbers.losses += found.losses
        numbers.grad_norms += found.grad_norms
        numbers.metrics = add_metrics(numbers.metrics, found.metrics)
    num_skipped = len(minibatches) - len(numbers.losses)
    numbers.metrics[SKIPPED_UPDATES] = Metric(float(num_skipped), float(len(minibatches)))
    if critic:
        valued = critic.sequences_with_targets(sequences, inputs)
        numbers.metrics |= _update_critic(critic, valued, plan, backend, settings)
        numbers.metrics |= critic.explained_variance(inputs)
    return numbers


def _update_critic(
    critic: Critic,
    sequences: Sequence[TrainingSequence],
    plan: Sequence[MinibatchPlan],
    backend: TrainerBackend,
    settings: StepSettings,
) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    for planned in plan:
        if (size := _size(sequences, planned)).num_tokens:
            batches = _batches(sequences, planned, backend, settings)
            metrics = add_metrics(metrics, critic.update(batches, size, settings))
    return metrics


def _batches(
    sequences: Sequence[TrainingSequence],
    planned: MinibatchPlan,
    backend: TrainerBackend,
    settings: StepSettings,
) -> dict[int, MicroBatches]:
    device, shared_by, mine = backend.settings.device, settings.context_ranks, settings.group.mine
    return {rank: MicroBatches(sequences, planned[rank // shared_by], device) for rank in mine}


def _with_proximal(
    backend: TrainerBackend, batch: MicroBatches, settings: StepSettings
) -> MicroBatches:
    """Keep all of them in one tensor: one a pass would lie in the way of the next pass's memory."""
    num_trained = [sum(batch.sequences[i].num_trained for i in indices) for indices in batch.packed]
    proximal = torch.split(torch.empty(sum(num_trained), device=batch.device), num_trained)
    for micro, kept_M in zip(batch, proximal, strict=True):
        (found_M,) = backend.logprobs([micro], temperature=settings.temperature)
        kept_M.copy_(found_M)
    return replace(batch, proximal_logprobs=proximal)


def learning_rate(settings: TrainerSettings, step: int) -> float:
    """Return the rate of step 1, 2, ...: of settings alone, so that a replay finds it again."""
    return scheduled_rate(
        settings.learning_rate,
        step=step,
        schedule=settings.learning_rate_schedule,
        num_warmup_steps=settings.num_learning_rate_warmup_steps,
        num_decay_steps=settings.num_learning_rate_decay_steps,
    )


def compute_advantages(
    sequences: Sequence[TrainingSequence], algorithm: ComposedAlgorithm
) -> list[Advantage]:
    """Return each trajectory's advantage, where it follows from the whole batch alone."""
    return list(algorithm.advantages(advantage_inputs(sequences)))


def advantage_inputs(sequences: Sequence[TrainingSequence]) -> AdvantageInputs:
    """Return what the advantages of a batch follow from, but for what passes must compute."""
    return AdvantageInputs(
        rewards_B=torch.tensor([s.reward for s in sequences], dtype=torch.float64),
        num_trained_B=torch.tensor([s.num_trained for s in sequences], dtype=torch.float64),
        groups_B=torch.tensor([s.group for s in sequences]),
        num_tokens_B=torch.tensor([len(s.output_tokens) for s in sequences], dtype=torch.float64),
        trained=[s.trained for s in sequences],
    )


def divergences(
    backend: TrainerBackend,
    sequences: Sequence[TrainingSequence],
    settings: StepSettings,
) -> torch.Tensor:
    """Return `AdvantageInputs.kl_N`: of the policy before the step, if it is computed at all."""
    algorithm, temperature = settings.algorithm, settings.temperature

    def compute(micro: MicroBatch) -> torch.Tensor:
        logprobs_M = micro.behavior_logprobs_M
        if algorithm.needs_proximal:
            (logprobs_M,) = backend.logprobs([micro], temperature=temperature)
        reference_M = backend.reference_logprobs(micro, temperature=temperature)
        return algorithm.kl(logprobs_M, reference_M)

    planned = plan_passes(sequences, settings, backend.settings.tokens_per_micro_batch)
    device = backend.settings.device
    return torch.cat(by_trajectory(compute, sequences, planned, settings, device=device))


def advantage_moments(sequences: Sequence[TrainingSequence]) -> dict[str, Metric]:
    values = [np.broadcast_to(np.asarray(s.advantage, float), len(s.trained)) for s in sequences]
    parts = [v[s.trained] for v, s in zip(values, sequences, strict=True)]
    trained = np.concatenate(parts or [np.zeros(0)])
    mean, deviation = (trained.mean(), trained.std()) if len(trained) else (0.0, 0.0)
    return {
        "advantage_mean": Metric(float(mean), 1.0),
        "advantage_std": Metric(float(deviation), 1.0),
    }


def plan_micro_batches(
    sequences: Sequence[TrainingSequence], *, step: int, settings: StepSettings, max_tokens: int
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
            units = units_of(sequences, members, settings.num_ranks, max_tokens)
        plan.append(_plan_minibatch(sequences, units, settings.num_ranks, max_tokens))
    return plan


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
    return (
        together if saved > MIN_SHARED_FRACTION * num_tokens else [[member] for member in members]
    )


def plan_passes(
    sequences: Sequence[TrainingSequence], settings: StepSettings, max_tokens: int
) -> MinibatchPlan:
    units = units_of(sequences, range(len(sequences)), settings.num_ranks, max_tokens)
    return _plan_minibatch(sequences, units, settings.num_ranks, max_tokens)


def _plan_minibatch(
    sequences: Sequence[TrainingSequence],
    units: Sequence[Sequence[int]],
    num_ranks: int,
    max_tokens: int,
) -> MinibatchPlan:
    """Return the plan of a minibatch of units, each of sequences that stay together."""
    lengths = [sum(sequences[member].num_tokens for member in unit) for unit in units]
    packed = pack_first_fit_decreasing(lengths, max_tokens=max_tokens)
    if missing := -len(packed) % num_ranks:
        packed = pack_first_fit_decreasing(
            lengths, max_tokens=max_tokens, min_micro_batches=len(packed) + missing
        )
    micro_batches = [[member for index in indices for member in units[index]] for indices in packed]
    work = [_work([sequences[member] for member in micro]) for micro in micro_batches]
    ranks = deal_by_work(work, num_ranks)
    dealt: MinibatchPlan = [[] for _ in range(num_ranks)]
    for micro, rank in zip(micro_batches, ranks, strict=True):
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


def _size(sequences: Sequence[TrainingSequence], planned: MinibatchPlan) -> MinibatchSize:
    indices = chain.from_iterable(chain.from_iterable(planned))
    trained = [sequences[index].num_trained for index in indices]
    return MinibatchSize(sum(trained), sum(num > 0 for num in trained))
