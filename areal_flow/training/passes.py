"""Forward and backward passes of a rank over its micro-batches, and sums of ranks' numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from areal_flow.algorithms.engine_gap import gap_metrics, gap_sums
from areal_flow.algorithms.objective import kl_to_reference
from areal_flow.algorithms.protocol import (
    LossInputs,
    Metric,
    PolicyLoss,
    add_metrics,
    mean,
    read_from_device,
    sum_of,
)
from areal_flow.policy.models.attention import to_host
from areal_flow.policy.models.policy import DTYPES
from areal_flow.training.head import token_logprobs, token_logprobs_and_entropies, top_logprobs
from areal_flow.training.planning import plan_passes
from areal_flow.training.replicas import ReplicaGroup, context_ranks, raise_trainer_lost
from areal_flow.training.sequences import MicroBatch, MicroBatches, TrainingSequence
from areal_flow.training.settings import TrainerSettings
from areal_flow.training.updates import Minibatch, MinibatchPlan, StepSettings, UpdateNumbers

ForwardRunner = Callable[..., Any]
"""Returns `function(policy, *arguments, **keywords)` for `function, *arguments, **keywords`, with
what the policy needs around a pass."""


MicroBatchMetrics = list[dict[str, Metric]]
"""Of each micro-batch of a rank: its metrics, and its loss under `LOSS`, not read yet."""

LOSS = ""
"""No metric has this name."""


class Passes:
    """Passes over one policy, and over the one that its loss compares it with."""

    def __init__(
        self,
        policy: ForwardRunner,
        settings: TrainerSettings,
        replicas: ReplicaGroup,
        *,
        reference: ForwardRunner,
    ) -> None:
        self._policy = policy
        self.settings = settings
        self.replicas = replicas
        self.reference = reference
        self.num_known: int | None = None
        """Of the reference's tokens the policy knows the first ones; None: all."""
        self._context_ranks = context_ranks(replicas, settings)

    @property
    def num_batches(self) -> int:
        """Among how many a minibatch is dealt: ranks that share sequences are one."""
        return self.replicas.num_ranks // self._context_ranks

    def batches(
        self, sequences: Sequence[TrainingSequence], planned: MinibatchPlan
    ) -> dict[int, MicroBatches]:
        """Return the batch of each rank that this process computes."""
        shared_by, device = self._context_ranks, self.settings.device
        return {
            rank: MicroBatches(sequences, planned[rank // shared_by], device)
            for rank in self.replicas.local_ranks
        }

    def logprobs(self, micro: MicroBatch, temperature: float) -> Tensor:
        """Return the log-probabilities of the trained tokens, without gradient."""
        logprobs_M: Tensor = self._without_gradient(
            self._policy, token_logprobs, micro, temperature=temperature
        )
        return logprobs_M

    def reference_logprobs(self, micro: MicroBatch, temperature: float) -> Tensor:
        logprobs_M: Tensor = self._without_gradient(
            self.reference, token_logprobs, micro, temperature=temperature
        )
        return logprobs_M

    @torch.no_grad()
    def _without_gradient(self, policy: ForwardRunner, *arguments: Any, **keywords: Any) -> Any:
        with raise_trainer_lost(), self.autocast():
            return policy(*arguments, **keywords)

    def by_trajectory(
        self,
        compute: Callable[[MicroBatch], Tensor],
        sequences: Sequence[TrainingSequence],
        planned: MinibatchPlan | None = None,
    ) -> list[Tensor]:
        """Return numbers of each sequence's trained tokens, float64, on every rank."""
        max_tokens = self.settings.tokens_per_micro_batch
        if planned is None:
            planned = plan_passes(sequences, max_tokens=max_tokens, num_ranks=self.num_batches)
        order = [[index for micro in of_rank for index in micro] for of_rank in planned]
        lengths = [[sequences[index].num_trained for index in of_rank] for of_rank in order]
        longest = max(map(sum, lengths))
        sent = {}
        for rank, batch in self.batches(sequences, planned).items():
            values_N = to_host(torch.cat([compute(micro) for micro in batch]))
            sent[rank] = pad(values_N, (0, longest - len(values_N)))  # ranks exchange one shape
        by_index: dict[int, Tensor] = {}
        for values_N, of_rank, counts in zip(self._gather(sent), order, lengths, strict=True):
            by_index |= zip(of_rank, torch.split(values_N[: sum(counts)], counts), strict=True)
        return [by_index[index] for index in range(len(sequences))]

    def minibatch_bound(self, minibatch: Minibatch) -> Tensor | None:
        """Return what an algorithm must know of all of a minibatch's tokens: one for all ranks."""
        settings = minibatch.settings
        if not settings.algorithm.needs_minibatch_bound:
            return None
        sent = {}
        for rank, micro_batches in minibatch.micro_batches.items():
            # Ranks exchange tensors of one shape: pad with NaN.
            sent[rank] = torch.full(
                (2, minibatch.size.num_tokens), torch.nan, device=self.settings.device
            )
            at = 0
            for micro in micro_batches:
                logprobs_M = self.logprobs(micro, settings.temperature)
                log_ratio_M = logprobs_M - micro.behavior_logprobs_M
                end = at + len(log_ratio_M)
                advantages_M = self._trained_advantages(micro, settings)
                sent[rank][:, at:end] = torch.stack([log_ratio_M, advantages_M])
                at = end
        tokens_2N = torch.cat(self._gather(sent), dim=1)
        return settings.algorithm.minibatch_bound(*tokens_2N)

    def _trained_advantages(self, micro: MicroBatch, settings: StepSettings) -> Tensor:
        """Return the advantages that the loss multiplies its ratio by."""
        algorithm = settings.algorithm
        if not algorithm.bound_needs_kl:
            return micro.advantages_M
        reference_M = self.reference_logprobs(micro, settings.temperature)
        kl_M = kl_to_reference(micro.behavior_logprobs_M, reference_M, algorithm.kl_estimator)
        return algorithm.less_kl(micro.advantages_M, kl_M)

    def backward(self, minibatch: Minibatch, rank: int, bound: Tensor | None) -> MicroBatchMetrics:
        def loss_of(micro: MicroBatch) -> PolicyLoss:
            inputs = self._loss_inputs(micro, minibatch, bound)
            if minibatch.gap_sums:
                fresh_T = inputs.versions_T == inputs.policy_version
                proximal_T, engine_T = inputs.proximal_logprobs_T, inputs.behavior_logprobs_T
                minibatch.gap_sums[rank].add_(gap_sums(proximal_T, engine_T, fresh_T))
            policy_loss = minibatch.settings.token_loss(inputs)
            assert inputs.entropy_T is not None
            return replace(
                policy_loss, metrics={**policy_loss.metrics, "entropy_mean": mean(inputs.entropy_T)}
            )

        return self.backward_of(loss_of, minibatch, rank)

    def backward_of(
        self, loss_of: Callable[[MicroBatch], PolicyLoss], minibatch: Minibatch, rank: int
    ) -> MicroBatchMetrics:
        """As `backward`, with any loss of a micro-batch; without gradients, the numbers alone."""
        aggregate, metrics = minibatch.settings.algorithm.aggregate, []
        for micro in minibatch.micro_batches[rank]:
            policy_loss = loss_of(micro)
            loss = aggregate(
                policy_loss.losses_T,
                micro.sequence_M,
                minibatch.size,
                num_sequences=micro.num_sequences,
            )
            if torch.is_grad_enabled():
                with raise_trainer_lost():
                    loss.backward()  # type: ignore[no-untyped-call]
            metrics.append({LOSS: sum_of(loss), **policy_loss.metrics})
        return metrics

    def add_gap(self, sums: Mapping[int, Tensor]) -> dict[str, Metric]:
        """Return the metrics of all ranks' gap, added in their order."""
        gap = gap_metrics(torch.stack(self._gather(sums)).sum(dim=0))
        return {name: Metric(value, 1.0) for name, value in gap.items()}

    def read(self, computed: Mapping[int, MicroBatchMetrics], grad_norm: Tensor) -> UpdateNumbers:
        """Return what the ranks of a minibatch found, added up.

        Here alone an update waits for its device.
        """
        norm = {LOSS: sum_of(grad_norm)}
        *each, read_norm = read_from_device([*chain.from_iterable(computed.values()), norm])
        in_order = iter(each)
        sent, kinds = {}, each[0]
        names = sorted(kinds)
        for rank, batches in computed.items():
            of_rank = reduce(add_metrics, islice(in_order, len(batches)), dict[str, Metric]())
            metrics = [of_rank[name] for name in names]
            numbers = [(m.total, m.weight or 0.0, m.squares or 0.0) for m in metrics]
            sent[rank] = torch.tensor(numbers, dtype=torch.float64)
        added = dict[str, Metric]()
        for numbers in (t.tolist() for t in self._gather(sent)):
            of_rank = {
                name: Metric(
                    total,
                    None if kinds[name].weight is None else weight,
                    None if kinds[name].squares is None else squares,
                )
                for name, (total, weight, squares) in zip(names, numbers, strict=True)
            }
            added = add_metrics(added, of_rank)
        loss = 0.0 + added.pop(LOSS).value  # never -0.0
        return UpdateNumbers([loss], [read_norm[LOSS].value], added)

    def _gather(self, sent: Mapping[int, Tensor]) -> list[Tensor]:
        """Return a tensor of each batch: ranks that share one have the same numbers of it."""
        return self.replicas.gather(sent)[:: self._context_ranks]

    def _loss_inputs(
        self, micro: MicroBatch, minibatch: Minibatch, bound: Tensor | None
    ) -> LossInputs:
        algorithm, temperature = minibatch.settings.algorithm, minibatch.settings.temperature
        proximal_M, reference_M, reference_MK = micro.proximal_logprobs_M, None, None
        if algorithm.reference_top_k:
            top_Mk, reference_MK = self._without_gradient(
                self.reference,
                top_logprobs,
                micro,
                temperature=temperature,
                top_k=algorithm.reference_top_k,
                num_known=self.num_known,
            )
            micro = replace(micro, top_Mk=top_Mk)
        elif algorithm.needs_reference and not algorithm.needs_kl:
            reference_M = self.reference_logprobs(micro, temperature)
        with self.autocast():
            logprobs_M, entropy_M, *buckets = self._policy(
                token_logprobs_and_entropies,
                micro,
                temperature=temperature,
                entropy_has_gradient=algorithm.needs_entropy,
            )
        return LossInputs(
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

    def autocast(self) -> torch.autocast:
        """Return the precision of passes; the master weights stay float32."""
        device_type, dtype = torch.device(self.settings.device).type, DTYPES[self.settings.dtype]
        return torch.autocast(device_type, dtype, enabled=dtype != torch.float32)
