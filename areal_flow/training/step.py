"""One training step: advantages over the whole batch, then one optimizer update a minibatch.

Minibatches are packed into micro-batches whose gradients add up. A loss is divided by the size of
its minibatch, so neither the packing nor the number of ranks changes the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from areal_flow.algorithms.composed import ComposedAlgorithm
from areal_flow.algorithms.logprobs import (
    gap_metrics,
    gap_sums,
    kl_to_reference,
    sequence_weights,
    zero_gap_sums,
)
from areal_flow.algorithms.protocol import (
    Advantage,
    AdvantageInputs,
    LossInputs,
    Metric,
    MinibatchSize,
    PolicyLoss,
    add_metrics,
    mean,
    read_from_device,
)
from areal_flow.core.types import SKIPPED_UPDATES
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.critic import Critic
from areal_flow.training.head import token_logprobs_and_entropies, top_logprobs
from areal_flow.training.ranked_model import Minibatch, OffPolicyNumbers, UpdateNumbers
from areal_flow.training.sequences import (
    MicroBatch,
    MicroBatches,
    MinibatchPlan,
    TrainingSequence,
    plan_micro_batches,
)
from areal_flow.training.settings import StepSettings


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
        rate: the learning rate; None: that of the backend's settings.
    """
    with backend.replicas.within_step():
        policy, algorithm = backend.trained, settings.algorithm
        plan = plan_micro_batches(
            sequences,
            step=step,
            settings=settings,
            max_tokens=backend.settings.tokens_per_micro_batch,
            num_ranks=policy.num_batches,
        )
        inputs = advantage_inputs(sequences)
        critic = backend.critic if algorithm.needs_critic else None
        if algorithm.needs_kl:
            inputs = replace(inputs, kl_N=_divergences(backend, sequences, settings))
        if critic:
            inputs = replace(inputs, values_BL=critic.values(sequences))
        advantages = list(algorithm.advantages(inputs))
        weighted = [replace(s, advantage=a) for s, a in zip(sequences, advantages, strict=True)]
        numbers = UpdateNumbers(
            metrics=advantage_moments(weighted), advantages=advantages, plan=plan
        )
        if inputs.kl_N is not None:
            numbers.metrics |= read_from_device([{"kl_policy_reference": mean(inputs.kl_N)}])[0]
        off_policy = _off_policy_numbers(backend, sequences, policy_version=step - 1)
        rate = backend.settings.learning_rate_at(step) if rate is None else rate
        template = Minibatch({}, MinibatchSize(0, 0), rate, settings, step - 1, off_policy)
        minibatches = _minibatches(backend, weighted, plan, template)
        for minibatch in minibatches:
            update = update_policy(backend, minibatch)
            numbers.losses += update.losses
            numbers.grad_norms += update.grad_norms
            numbers.metrics = add_metrics(numbers.metrics, update.metrics)
        num_skipped = len(minibatches) - len(numbers.losses)
        gaps = {rank: n.gap_sums for rank, n in off_policy.items() if n.gap_sums is not None}
        if gaps:
            sums = torch.stack(policy.gather(gaps)).sum(dim=0)
            numbers.metrics |= {name: Metric(v, 1.0) for name, v in gap_metrics(sums).items()}
        weights = policy.gather({rank: each.weights_2B for rank, each in off_policy.items()})
        numbers.weights_2B = reduce(torch.fmax, weights)  # a trajectory is in one rank's batch
        numbers.metrics[SKIPPED_UPDATES] = Metric(float(num_skipped), float(len(minibatches)))
        if critic:
            numbers.metrics |= _update_critic(critic, sequences, inputs, plan, settings)
        return numbers


def _minibatches(
    backend: TrainerBackend,
    sequences: Sequence[TrainingSequence],
    plan: Sequence[MinibatchPlan],
    template: Minibatch,
) -> list[Minibatch]:
    """Return the minibatches of a step that have a trained token."""
    settings, minibatches = template.settings, list[Minibatch]()
    for planned in plan:
        batches = backend.trained.batches(sequences, planned)
        if minibatches and settings.needs_proximal:  # before any update: of the policy before it
            batches = {rank: _with_proximal(backend, b, settings) for rank, b in batches.items()}
        updated = any(minibatch.size.num_tokens for minibatch in minibatches)
        minibatch = replace(template, micro_batches=batches, size=_size(sequences, planned))
        if updated and not settings.needs_proximal:
            minibatch = replace(minibatch, off_policy=None)
        minibatches.append(minibatch)
    return [minibatch for minibatch in minibatches if minibatch.size.num_tokens]


def _with_proximal(
    backend: TrainerBackend, batch: MicroBatches, settings: StepSettings
) -> MicroBatches:
    """Compute the proximal log-probabilities into one shared buffer, to avoid fragmentation."""
    num_trained = [sum(batch.sequences[i].num_trained for i in indices) for indices in batch.packed]
    proximal = torch.split(torch.empty(sum(num_trained), device=batch.device), num_trained)
    for micro, buffer_M in zip(batch, proximal, strict=True):
        buffer_M.copy_(backend.trained.logprobs(micro, settings.temperature))
    return replace(batch, proximal_logprobs=proximal)


def update_policy(backend: TrainerBackend, minibatch: Minibatch) -> UpdateNumbers:
    """Make one optimizer update of the policy; all ranks make the same."""
    bound = _minibatch_bound(backend, minibatch)
    loss = partial(policy_loss, backend, minibatch, bound)
    return backend.trained.update(minibatch, loss, name="update")


def _minibatch_bound(backend: TrainerBackend, minibatch: Minibatch) -> Tensor | None:
    """Return the algorithm's bound for a minibatch, from the tokens of all ranks."""
    algorithm, temperature = minibatch.settings.algorithm, minibatch.settings.temperature
    if not algorithm.needs_minibatch_bound:
        return None
    local = {}
    for rank, micro_batches in minibatch.micro_batches.items():
        # Ranks exchange tensors of one shape: pad with NaN.
        local[rank] = torch.full(
            (2, minibatch.size.num_tokens), torch.nan, device=backend.settings.device
        )
        start = 0
        for micro in micro_batches:
            log_ratio_M = backend.trained.logprobs(micro, temperature) - micro.behavior_logprobs_M
            advantages_M, end = micro.advantages_M, start + len(log_ratio_M)
            if algorithm.bound_needs_kl:
                reference_M = backend.reference_logprobs(micro, temperature)
                behavior_M = micro.behavior_logprobs_M
                kl_M = kl_to_reference(behavior_M, reference_M, algorithm.kl_estimator)
                advantages_M = algorithm.subtract_kl(advantages_M, kl_M)
            local[rank][:, start:end] = torch.stack([log_ratio_M, advantages_M])
            start = end
    return algorithm.minibatch_bound(*torch.cat(backend.trained.gather(local), dim=1))


def policy_loss(
    backend: TrainerBackend,
    minibatch: Minibatch,
    bound: Tensor | None,
    micro: MicroBatch,
    rank: int,
) -> PolicyLoss:
    """Return a micro-batch's loss, and add its tokens to the minibatch's off-policy numbers."""
    settings, algorithm = minibatch.settings, minibatch.settings.algorithm
    temperature, proximal_M = settings.temperature, micro.proximal_logprobs_M
    reference_M = reference_MK = None
    if algorithm.reference_top_k:
        top_Mk, reference_MK = backend.run_reference(
            top_logprobs,
            micro,
            temperature=temperature,
            top_k=algorithm.reference_top_k,
            num_known=backend.num_common_tokens,
        )
        micro = replace(micro, top_Mk=top_Mk)
    elif algorithm.needs_reference and not algorithm.needs_kl:
        reference_M = backend.reference_logprobs(micro, temperature)
    logprobs_M, entropy_M, *buckets = backend.trained.run(
        token_logprobs_and_entropies,
        micro,
        temperature=temperature,
        entropy_has_gradient=algorithm.needs_entropy,
    )
    inputs = LossInputs(
        logprobs_T=logprobs_M,
        proximal_logprobs_T=logprobs_M.detach() if proximal_M is None else proximal_M,
        behavior_logprobs_T=micro.behavior_logprobs_M,
        advantages_T=micro.advantages_M,
        sequence_T=micro.sequence_M,
        versions_T=micro.versions_M,
        num_sequences=micro.num_sequences,
        entropy_T=entropy_M,
        reference_logprobs_T=reference_M,
        bucket_logprobs_TK=buckets[0] if buckets else None,
        reference_bucket_logprobs_TK=reference_MK,
        policy_version=minibatch.policy_version,
        minibatch_bound=bound,
    )
    if minibatch.off_policy:
        _add_tokens(minibatch.off_policy[rank], micro, inputs)
    loss = settings.token_loss(inputs)
    return replace(loss, metrics={**loss.metrics, "entropy_mean": mean(entropy_M)})


def _off_policy_numbers(
    backend: TrainerBackend, sequences: Sequence[TrainingSequence], *, policy_version: int
) -> dict[int, OffPolicyNumbers]:
    ranks, device = backend.trained.replicas.local_ranks, backend.settings.device
    is_fresh = any(span.version == policy_version for s in sequences for span in s.version_spans)
    gaps = zero_gap_sums(ranks, device) if is_fresh else {}
    shape = 2, len(sequences)
    return {
        rank: OffPolicyNumbers(torch.full(shape, torch.nan, device=device), gaps.get(rank))
        for rank in ranks
    }


def _add_tokens(numbers: OffPolicyNumbers, micro: MicroBatch, inputs: LossInputs) -> None:
    proximal_T, behavior_T = inputs.proximal_logprobs_T, inputs.behavior_logprobs_T
    if numbers.gap_sums is not None:
        fresh_T = inputs.versions_T == inputs.policy_version
        numbers.gap_sums.add_(gap_sums(proximal_T, behavior_T, fresh_T))
    assert micro.batch_index_S is not None, "the micro-batches of a batch have their places"
    weights_2S = sequence_weights(proximal_T - behavior_T, micro.sequence_M, micro.num_sequences)
    numbers.weights_2B[:, micro.batch_index_S[: micro.num_sequences]] = weights_2S


def _update_critic(
    critic: Critic,
    sequences: Sequence[TrainingSequence],
    inputs: AdvantageInputs,
    plan: Sequence[MinibatchPlan],
    settings: StepSettings,
) -> dict[str, Metric]:
    valued, metrics = critic.sequences_with_targets(sequences, inputs), dict[str, Metric]()
    for planned in plan:
        if (size := _size(sequences, planned)).num_tokens:
            batches = critic.trained.batches(valued, planned)
            metrics = add_metrics(metrics, critic.update(batches, size, settings))
    return metrics | critic.explained_variance(inputs)


def compute_advantages(
    sequences: Sequence[TrainingSequence], algorithm: ComposedAlgorithm
) -> list[Advantage]:
    """Return each trajectory's advantage, for an algorithm without critic and KL in the reward."""
    return list(algorithm.advantages(advantage_inputs(sequences)))


def advantage_inputs(sequences: Sequence[TrainingSequence]) -> AdvantageInputs:
    """Return the inputs of advantages that need no forward pass."""
    return AdvantageInputs(
        rewards_B=torch.tensor([s.reward for s in sequences], dtype=torch.float64),
        num_trained_B=torch.tensor([s.num_trained for s in sequences], dtype=torch.float64),
        groups_B=torch.tensor([s.group for s in sequences]),
        num_tokens_B=torch.tensor([len(s.output_tokens) for s in sequences], dtype=torch.float64),
        trained=[s.trained for s in sequences],
    )


def _divergences(
    backend: TrainerBackend, sequences: Sequence[TrainingSequence], settings: StepSettings
) -> Tensor:
    """Return `AdvantageInputs.kl_N`, for the policy before the step or the behavior policy."""
    algorithm, temperature = settings.algorithm, settings.temperature

    def compute(micro: MicroBatch) -> Tensor:
        logprobs_M = micro.behavior_logprobs_M
        if algorithm.needs_proximal:
            logprobs_M = backend.trained.logprobs(micro, temperature)
        reference_M = backend.reference_logprobs(micro, temperature)
        return kl_to_reference(logprobs_M, reference_M, algorithm.kl_estimator)

    return torch.cat(backend.trained.by_trajectory(compute, sequences))


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
