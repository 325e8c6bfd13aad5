"""One training step: advantages over the whole batch, then one optimizer update a minibatch.

Minibatches are packed into micro-batches whose gradients add up. A loss is divided by the size of
its minibatch, so neither the packing nor the number of ranks changes the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from areal_flow.algorithms.composed import ComposedAlgorithm
from areal_flow.algorithms.engine_gap import no_gap
from areal_flow.algorithms.learning_rates import scheduled_rate
from areal_flow.algorithms.objective import kl_to_reference
from areal_flow.algorithms.protocol import (
    Advantage,
    AdvantageInputs,
    Metric,
    MinibatchSize,
    add_metrics,
    mean,
    read_from_device,
)
from areal_flow.core.step_metrics import SKIPPED_UPDATES
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.critic import Critic
from areal_flow.training.planning import plan_micro_batches
from areal_flow.training.sequences import MicroBatch, MicroBatches, TrainingSequence
from areal_flow.training.settings import TrainerSettings
from areal_flow.training.updates import Minibatch, MinibatchPlan, StepSettings, UpdateNumbers


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
    with backend.replicas.within_step():
        rate = learning_rate(backend.settings, step) if rate is None else rate
        passes, algorithm = backend.passes, settings.algorithm
        max_tokens, num_ranks = backend.settings.tokens_per_micro_batch, passes.num_batches
        plan = plan_micro_batches(
            sequences, step=step, settings=settings, max_tokens=max_tokens, num_ranks=num_ranks
        )
        inputs = advantage_inputs(sequences)
        critic = backend.critic if algorithm.needs_critic else None
        if algorithm.needs_kl:
            inputs = replace(inputs, kl_N=_divergences(backend, sequences, settings))
        if critic:
            inputs = replace(inputs, values_BL=critic.values(sequences))
        advantages = list(algorithm.advantages(inputs))
        weighted = [replace(s, advantage=a) for s, a in zip(sequences, advantages, strict=True)]
        is_fresh = any(span.version == step - 1 for s in sequences for span in s.version_spans)
        gap = no_gap(passes.replicas.local_ranks, backend.settings.device) if is_fresh else None
        one = Minibatch({}, MinibatchSize(0, 0), rate, settings, step - 1, gap)
        minibatches = _minibatches(backend, weighted, plan, one)
        numbers = UpdateNumbers(
            metrics=advantage_moments(weighted), advantages=advantages, plan=plan
        )
        if inputs.kl_N is not None:
            numbers.metrics |= read_from_device([{"kl_policy_reference": mean(inputs.kl_N)}])[0]
        for minibatch in minibatches:
            update = backend.update(minibatch)
            numbers.losses += update.losses
            numbers.grad_norms += update.grad_norms
            numbers.metrics = add_metrics(numbers.metrics, update.metrics)
        num_skipped = len(minibatches) - len(numbers.losses)
        if gap:
            numbers.metrics |= passes.add_gap(gap)
        numbers.metrics[SKIPPED_UPDATES] = Metric(float(num_skipped), float(len(minibatches)))
        if critic:
            numbers.metrics |= _update_critic(backend, critic, sequences, inputs, plan, settings)
        return numbers


def _minibatches(
    backend: TrainerBackend,
    sequences: Sequence[TrainingSequence],
    plan: Sequence[MinibatchPlan],
    one: Minibatch,
) -> list[Minibatch]:
    """Return those of a step that have a trained token, each with what `one` says of them all."""
    settings, minibatches = one.settings, list[Minibatch]()
    for planned in plan:
        batches = backend.passes.batches(sequences, planned)
        if minibatches and settings.needs_proximal:  # before any update: of the policy before it
            batches = {rank: _with_proximal(backend, b, settings) for rank, b in batches.items()}
        updated = any(minibatch.size.num_tokens for minibatch in minibatches)
        gap = one.gap_sums if settings.needs_proximal or not updated else None
        size = _size(sequences, planned)
        minibatches.append(replace(one, micro_batches=batches, size=size, gap_sums=gap))
    return [minibatch for minibatch in minibatches if minibatch.size.num_tokens]


def _update_critic(
    backend: TrainerBackend,
    critic: Critic,
    sequences: Sequence[TrainingSequence],
    inputs: AdvantageInputs,
    plan: Sequence[MinibatchPlan],
    settings: StepSettings,
) -> dict[str, Metric]:
    valued, metrics = critic.sequences_with_targets(sequences, inputs), dict[str, Metric]()
    for planned in plan:
        if (size := _size(sequences, planned)).num_tokens:
            batches = backend.passes.batches(valued, planned)
            metrics = add_metrics(metrics, critic.update(batches, size, settings))
    return metrics | critic.explained_variance(inputs)


def _with_proximal(
    backend: TrainerBackend, batch: MicroBatches, settings: StepSettings
) -> MicroBatches:
    """Keep all of them in one tensor: one a pass would lie in the way of the next pass's memory."""
    num_trained = [sum(batch.sequences[i].num_trained for i in indices) for indices in batch.packed]
    proximal = torch.split(torch.empty(sum(num_trained), device=batch.device), num_trained)
    for micro, kept_M in zip(batch, proximal, strict=True):
        kept_M.copy_(backend.passes.logprobs(micro, settings.temperature))
    return replace(batch, proximal_logprobs=proximal)


def learning_rate(settings: TrainerSettings, step: int) -> float:
    """Return the rate of step 1, 2, ...: of settings alone, so that a replay finds it again."""
    return scheduled_rate(
        settings.learning_rate,
        step=step,
        schedule=settings.learning_rate_schedule,
        num_warmup_steps=settings.num_warmup_steps,
        num_decay_steps=settings.num_decay_steps,
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


def _divergences(
    backend: TrainerBackend, sequences: Sequence[TrainingSequence], settings: StepSettings
) -> torch.Tensor:
    """Return `AdvantageInputs.kl_N`: of the policy before the step, if it is computed at all."""
    algorithm, temperature, passes = settings.algorithm, settings.temperature, backend.passes

    def compute(micro: MicroBatch) -> torch.Tensor:
        logprobs_M = micro.behavior_logprobs_M
        if algorithm.needs_proximal:
            logprobs_M = passes.logprobs(micro, temperature)
        reference_M = passes.reference_logprobs(micro, temperature)
        return kl_to_reference(logprobs_M, reference_M, algorithm.kl_estimator)

    return torch.cat(passes.by_trajectory(compute, sequences))


def advantage_moments(sequences: Sequence[TrainingSequence]) -> dict[str, Metric]:
    parts = [np.broadcast_to(s.advantage, s.trained.shape)[s.trained] for s in sequences]
    trained = np.concatenate([np.zeros(0), *parts])
    mean, deviation = (trained.mean(), trained.std()) if len(trained) else (0.0, 0.0)
    moments = {"advantage_mean": mean, "advantage_std": deviation}
    return {name: Metric(float(value), 1.0) for name, value in moments.items()}


def _size(sequences: Sequence[TrainingSequence], planned: MinibatchPlan) -> MinibatchSize:
    indices = chain.from_iterable(chain.from_iterable(planned))
    trained = [sequences[index].num_trained for index in indices]
    return MinibatchSize(sum(trained), sum(num > 0 for num in trained))
