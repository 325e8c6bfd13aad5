"""A model as one rank has it: whole in a process that is alone, else the rank's rows of it.

Its tensors are named as files name them. Those with parts on other ranks are read by all ranks
together, in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import reduce
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from areal_flow.policy.models.policy import copy_by_name, fill_buffers, policy_tensors
from areal_flow.training.activations import choose_activations
from areal_flow.training.context import over_ranks
from areal_flow.training.kernels import compile_layers, compiles_layers
from areal_flow.training.optimizers import make_optimizer
from areal_flow.training.passes import MicroBatchMetrics, Passes
from areal_flow.training.replicas import ReplicaGroup, raise_trainer_lost
from areal_flow.training.settings import TrainerSettings
from areal_flow.training.tensor_rows import Rows, is_sharded, local_rows
from areal_flow.training.updates import Minibatch, UpdateNumbers

if TYPE_CHECKING:
    from areal_flow.training.sharded import ShardedModel

logger = logging.getLogger(__name__)


class RankedModel:
    def __init__(self, model: Any, settings: TrainerSettings, replicas: ReplicaGroup) -> None:
        """Take a model, whose parameters may be on the meta device: weights are loaded later."""
        self.model = model
        if compiles_layers(settings):
            compile_layers(model)
        choose_activations(model, settings)
        self._sharded: ShardedModel | None = None
        if not replicas.is_single_process:
            from areal_flow.training.sharded import ShardedModel  # a second that few need

            mesh = replicas.mesh(settings.parallel.shard_ranks or replicas.num_ranks)
            self._sharded = ShardedModel(model, mesh, settings)
        if any(parameter.is_meta for parameter in model.parameters()):
            (self._sharded or model).to_empty(device=settings.device)
            model.tie_weights()
            fill_buffers(model)
        self.run = over_ranks(self._sharded or self._run_whole, settings, replicas)

    def _run_whole(self, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
        return function(self.model, *arguments, **keywords)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights by name, a tied one once; those with parts elsewhere are DTensors."""
        return policy_tensors(self.model)

    def load(self, weights: Rows) -> None:
        """Copy this rank's rows.

        Raises:
            WeightsError: they are of another model.
        """
        tensors = self.tensors()
        own = {name: local_rows(tensor)[0] for name, tensor in tensors.items()}
        copy_by_name(own, weights, lambda name: weights[name](*_range(tensors[name])))
        self.reshard()

    def reshard(self) -> None:
        """Have the next pass gather the weights again: what is gathered of them is old."""
        if self._sharded:
            self._sharded.reshard_all()


class TrainedModel(RankedModel):
    """And its optimizer."""

    def __init__(self, model: Any, settings: TrainerSettings, replicas: ReplicaGroup) -> None:
        super().__init__(model, settings, replicas)
        self.optimizer = make_optimizer(model.named_parameters(), settings)

    @raise_trainer_lost()
    def update(
        self,
        passes: Passes,
        backward: Callable[[int], MicroBatchMetrics],
        minibatch: Minibatch,
        *,
        name: str,
    ) -> UpdateNumbers:
        """Make one optimizer update by the gradients of all batches.

        Where the loss or the gradient is not finite, nothing changes, and there are no numbers.

        Raises:
            TrainerLost: another rank left meanwhile. Nothing may be computed any more.
        """
        optimizer, computed, gradients = self.optimizer, {}, []
        for rank in minibatch.micro_batches:
            for parameter in optimizer.trainable:
                parameter.grad = None
            computed[rank] = backward(rank)
            gradients.append([parameter.grad for parameter in optimizer.trainable])
        # Each batch's by itself, then in order: so did the ranks of older runs.
        for parameter, *of_batches in zip(optimizer.trainable, *gradients, strict=True):
            per_batch = [gradient for gradient in of_batches if gradient is not None]
            parameter.grad = reduce(torch.add, per_batch) if per_batch else None
        max_norm = passes.settings.max_grad_norm
        norm = whole(torch.nn.utils.clip_grad_norm_(optimizer.trainable, max_norm))
        numbers = passes.read(computed, norm)
        if not all(map(isfinite, (*numbers.losses, *numbers.grad_norms))):
            loss, grad_norm = numbers.losses, numbers.grad_norms
            logger.warning("%s skipped: loss %s, gradient norm %s", name, *loss, *grad_norm)
            return UpdateNumbers()
        self.reshard()
        optimizer.update(learning_rate=minibatch.learning_rate)
        return numbers

    def load_optimizer(self, state: Rows) -> None:
        self.optimizer.load_named_state({name: self._moment(name, state) for name in sorted(state)})

    def _moment(self, name: str, state: Rows) -> Tensor:
        parameter = self.model.get_parameter(name.rpartition(".")[0]).detach()
        rows = state[name](*_range(parameter))
        if not (rows.ndim and is_sharded(parameter)):
            return rows
        from areal_flow.training.sharded import sharded_like

        return sharded_like(parameter, rows)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the rows of all ranks, which all ask for it."""
    if not is_sharded(tensor):
        return tensor
    with raise_trainer_lost():
        return cast("Any", tensor).full_tensor()  # type: ignore[no-any-return]


def _range(tensor: Tensor) -> tuple[int, int]:
    """Return the first and the number of this rank's rows."""
    local, first_row = local_rows(tensor)
    return first_row, len(local) if local.ndim else 1
