"""A model as one rank has it: its rows of the weights, passes over it, and its optimizer.

A model is whole in one process, or several ranks shard it: each holds rows of every tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain, islice
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from areal_flow.algorithms.protocol import (
    Advantage,
    Metric,
    MinibatchSize,
    PolicyLoss,
    add_metrics,
    read_from_device,
    sum_of,
)
from areal_flow.policy.models.attention import to_host
from areal_flow.policy.models.policy import DTYPES, copy_by_name, fill_buffers, policy_tensors
from areal_flow.training.head import token_logprobs
from areal_flow.training.kernels import prepare_layers
from areal_flow.training.optimizers import OPTIMIZERS
from areal_flow.training.parallel import ShardedModel, run_over_ranks
from areal_flow.training.replicas import ReplicaGroup, context_ranks, raise_trainer_lost
from areal_flow.training.sequences import (
    MicroBatch,
    MicroBatches,
    MinibatchPlan,
    TrainingSequence,
    plan_passes,
)
from areal_flow.training.settings import StepSettings, TrainerSettings
from areal_flow.training.tensor_rows import TensorReaders, full_tensor, local_rows

logger = logging.getLogger(__name__)

LOSS_KEY = ""
"""The loss of a micro-batch among its metrics, none of which has this name."""

MicroBatchLoss = Callable[[MicroBatch, int], PolicyLoss]
"""Returns the loss of a rank's micro-batch."""

MicroBatchMetrics = list[dict[str, Metric]]
"""The metrics of each of a rank's micro-batches, on the device."""


Copies = Sequence[Future[None]]
"""Parts of a copy that threads make."""


def wait_for_copies(copies: Copies) -> None:
    """Wait until a copy is made; raise what it raised."""
    for each in copies:
        each.result()


@dataclass(frozen=True, slots=True)
class OffPolicyNumbers:
    """How far the policy before a step is from those that sampled; each loss adds its tokens."""

    weights_2B: Tensor
    """Mean and maximum of each trajectory's importance weights, float32; NaN until it has any."""
    gap_sums: Tensor | None
    """Of the engine gap; None without a token that the policy before the step sampled."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What one optimizer update is computed from."""

    micro_batches: Mapping[int, Sequence[MicroBatch]]
    """By rank, of the ranks that this process computes."""
    size: MinibatchSize
    learning_rate: float
    settings: StepSettings
    policy_version: int = 0
    """Of the policy before the step."""
    off_policy: Mapping[int, OffPolicyNumbers] | None = None
    """By rank; None where the pass has no log-probabilities of the policy before the step."""


@dataclass(slots=True)
class UpdateNumbers:
    """The results of one update, or of all updates of a step that were not skipped."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    metrics: dict[str, Metric] = field(default_factory=dict)
    advantages: list[Advantage] = field(default_factory=list, compare=False)
    """Of a step: one per trajectory. Not compared, since arrays are not equal as a whole."""
    plan: list[MinibatchPlan] = field(default_factory=list, compare=False)
    """Of a step."""
    weights_2B: Tensor | None = field(default=None, compare=False)
    """Of a step: `OffPolicyNumbers.weights_2B` of all ranks."""


class RankedModel:
    """A model without an optimizer, such as a reference."""

    def __init__(self, model: Any, settings: TrainerSettings, replicas: ReplicaGroup) -> None:
        """Take a model, whose parameters may be on the meta device: weights are loaded later."""
        self.model, self.settings, self.replicas = model, settings, replicas
        prepare_layers(model, settings)
        self._sharded: ShardedModel | None = None
        if not replicas.is_single_process:
            mesh = replicas.mesh(settings.parallel.shard_ranks or replicas.num_ranks)
            self._sharded = ShardedModel(model, mesh, settings)
        if any(parameter.is_meta for parameter in model.parameters()):
            (self._sharded or model).to_empty(device=settings.device)
            model.tie_weights()
            fill_buffers(model)
        self._context_ranks = context_ranks(replicas, settings)
        self._context_group: Any = None
        if self._context_ranks > 1:
            self._context_group = replicas.mesh(self._context_ranks).get_group(-1)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by name, a tied one once; those with parts elsewhere are DTensors."""
        return policy_tensors(self.model)

    def load(self, weights: TensorReaders) -> None:
        """Copy this rank's rows.

        Raises:
            WeightsError: they are of another model.
        """
        tensors = self.tensors()
        own = {name: local_rows(tensor)[0] for name, tensor in tensors.items()}
        copy_by_name(own, weights, lambda name: weights[name](*_range(tensors[name])))
        self.reshard()

    def reshard(self) -> None:
        """Drop gathered weights, which are old: the next pass gathers them again."""
        if self._sharded:
            self._sharded.reshard_all()

    def run(self, function: Callable[..., Any], micro: MicroBatch, **keywords: Any) -> Any:
        """Return `function(model, micro, **keywords)`: tensors with an entry per trained token."""
        settings = self.settings
        device_type, dtype = torch.device(settings.device).type, DTYPES[settings.dtype]
        # The precision of passes; the master weights stay float32.
        autocast = torch.autocast(device_type, dtype, enabled=dtype != torch.float32)
        with raise_trainer_lost(), autocast:
            if self._context_group:
                return run_over_ranks(self._call, self._context_group, function, micro, **keywords)
            return self._call(function, micro, **keywords)

    def _call(self, function: Callable[..., Any], micro: MicroBatch, **keywords: Any) -> Any:
        if self._sharded:
            return self._sharded(function, micro, **keywords)
        return function(self.model, micro, **keywords)

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch, temperature: float) -> Tensor:
        """Return log-probabilities of the trained tokens, without gradient."""
        return self.run(token_logprobs, micro, temperature=temperature)  # type: ignore[no-any-return]

    @property
    def num_batches(self) -> int:
        """Parts of a minibatch: ranks that share sequences get the same one."""
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
        order = [[*chain.from_iterable(micro_batches)] for micro_batches in planned]
        lengths = [[sequences[index].num_trained for index in indices] for indices in order]
        longest = max(map(sum, lengths))
        local = {}
        for rank, batch in self.batches(sequences, planned).items():
            values_N = to_host(torch.cat([compute(micro) for micro in batch]))
            local[rank] = pad(values_N, (0, longest - len(values_N)))  # ranks exchange one shape
        by_index: dict[int, Tensor] = {}
        for values_N, indices, counts in zip(self.gather(local), order, lengths, strict=True):
            by_index |= zip(indices, torch.split(values_N[: sum(counts)], counts), strict=True)
        return [by_index[index] for index in range(len(sequences))]

    def gather(self, local: Mapping[int, Tensor]) -> list[Tensor]:
        """Return every batch's tensor; ranks that share a batch have equal ones."""
        return self.replicas.gather(local)[:: self._context_ranks]


class TrainedModel(RankedModel):
    def __init__(self, model: Any, settings: TrainerSettings, replicas: ReplicaGroup) -> None:
        super().__init__(model, settings, replicas)
        self.optimizer = OPTIMIZERS[settings.optimizer](model.named_parameters(), settings)
        self.copies: Copies = ()
        """Copies of the state that are being made, and end before it changes."""

    @raise_trainer_lost()
    def update(self, minibatch: Minibatch, loss: MicroBatchLoss, *, name: str) -> UpdateNumbers:
        """Make one optimizer update by the gradients of all batches; all ranks make the same.

        Where the loss or the gradient is not finite, nothing changes, and there are no numbers.

        Raises:
            TrainerLost: another rank left meanwhile. Nothing may be computed any more.
        """
        optimizer, metrics, gradients = self.optimizer, {}, []
        for rank in minibatch.micro_batches:
            for parameter in optimizer.trainable:
                parameter.grad = None
            metrics[rank] = self.backward(minibatch, rank, loss)
            gradients.append([parameter.grad for parameter in optimizer.trainable])
        # Accumulate each batch by itself, then add them in order, as recorded runs did.
        for parameter, *of_batches in zip(optimizer.trainable, *gradients, strict=True):
            per_batch = [gradient for gradient in of_batches if gradient is not None]
            parameter.grad = reduce(torch.add, per_batch) if per_batch else None
        max_norm = self.settings.max_grad_norm
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(optimizer.trainable, max_norm))
        numbers = self.read(metrics, norm)
        if not all(map(isfinite, (*numbers.losses, *numbers.grad_norms))):
            loss_value, grad_norm = *numbers.losses, *numbers.grad_norms
            logger.warning("%s skipped: loss %s, gradient norm %s", name, loss_value, grad_norm)
            return UpdateNumbers()
        self.reshard()
        wait_for_copies(self.copies)
        optimizer.update(learning_rate=minibatch.learning_rate)
        return numbers

    def backward(self, minibatch: Minibatch, rank: int, loss: MicroBatchLoss) -> MicroBatchMetrics:
        """Accumulate the gradients of a rank's micro-batches, if enabled; return metrics."""
        aggregate, metrics = minibatch.settings.algorithm.aggregate, []
        for micro in minibatch.micro_batches[rank]:
            policy_loss = loss(micro, rank)
            total = aggregate(
                policy_loss.losses_T,
                micro.sequence_M,
                minibatch.size,
                num_sequences=micro.num_sequences,
            )
            if torch.is_grad_enabled():
                with raise_trainer_lost():
                    total.backward()  # type: ignore[no-untyped-call]
            metrics.append({LOSS_KEY: sum_of(total), **policy_loss.metrics})
        return metrics

    def read(self, computed: Mapping[int, MicroBatchMetrics], grad_norm: Tensor) -> UpdateNumbers:
        """Return a minibatch's loss and metrics over all ranks.

        Only here does an update wait for its device.
        """
        norm = {LOSS_KEY: sum_of(grad_norm)}
        *metrics, read_norm = read_from_device([*chain.from_iterable(computed.values()), norm])
        in_order, kinds, local = iter(metrics), metrics[0], {}
        names = sorted(kinds)
        for rank, micro_batches in computed.items():
            added = reduce(add_metrics, islice(in_order, len(micro_batches)), dict[str, Metric]())
            values = [added[name] for name in names]
            rows = [(m.total, m.weight or 0.0, m.squares or 0.0) for m in values]
            local[rank] = torch.tensor(rows, dtype=torch.float64)
        total = dict[str, Metric]()
        for rows_of_rank in self.gather(local):
            of_rank = {
                name: Metric(
                    total_value,
                    None if kinds[name].weight is None else weight,
                    None if kinds[name].squares is None else squares,
                )
                for name, (total_value, weight, squares) in zip(
                    names, rows_of_rank.tolist(), strict=True
                )
            }
            total = add_metrics(total, of_rank)
        loss = 0.0 + total.pop(LOSS_KEY).value  # never -0.0
        return UpdateNumbers([loss], [read_norm[LOSS_KEY].value], total)

    def load_optimizer(self, state: TensorReaders) -> None:
        self.optimizer.load_named_state({name: self._moment(name, state) for name in sorted(state)})

    def _moment(self, name: str, state: TensorReaders) -> Tensor:
        parameter = self.model.get_parameter(name.rpartition(".")[0]).detach()
        rows = state[name](*_range(parameter))
        if not (rows.ndim and isinstance(parameter, DTensor)):
            return rows
        return DTensor.from_local(
            rows.to(parameter.to_local().device),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def _range(tensor: Tensor) -> tuple[int, int]:
    """Return the first and the number of this rank's rows."""
    local, first_row = local_rows(tensor)
    return first_row, len(local) if local.ndim else 1
