"""Optimizers by name, and updates by the gradients of all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from math import isfinite
from typing import Protocol

import torch
from torch import Tensor, nn

from areal_flow.config import TrainerSettings
from areal_flow.errors import ConfigError
from areal_flow.settings import import_function
from areal_flow.trainer.passes import Found, Passes
from areal_flow.trainer.replicas import ReplicaGroup
from areal_flow.trainer.updates import Minibatch, UpdateNumbers

logger = logging.getLogger(__name__)

OPTIMIZERS = {
    "adamw": "areal_flow.trainer.adamw:PolicyAdamW",
    "muon": "areal_flow.trainer.muon:PolicyMuon",
}
"""By the name that recipes use. The next one is a file, a line here and in `config`, and tests."""


class PolicyOptimizer(Protocol):
    """Moves the parameters of a policy that are not frozen, whole or rows of them."""

    trainable: list[nn.Parameter]

    def update(self, *, learning_rate: float) -> None:
        """Move the parameters by their gradients; one without a gradient stays."""

    def named_state(self) -> dict[str, Tensor]:
        """Return the state: `PARAMETER.KEY` of each parameter's, shaped as it is or a scalar."""

    def load_named_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `named_state` returned."""


def make_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], settings: TrainerSettings
) -> PolicyOptimizer:
    path = OPTIMIZERS[settings.optimizer]
    make = import_function(path, setting="trainer.optimizer", error=ConfigError)
    return make(named_parameters, settings)  # type: ignore[no-any-return]


def update_whole(
    optimizer: PolicyOptimizer,
    passes: Passes,
    backward: Callable[[int], Found],
    minibatch: Minibatch,
    *,
    name: str,
) -> UpdateNumbers:
    """Update a model that each rank holds whole by all ranks' gradients; see `update_if_finite`."""
    computed, gradients = {}, {}
    for rank in minibatch.micro_batches:
        forget_gradients(optimizer)
        computed[rank] = backward(rank)
        gradients[rank] = [parameter.grad for parameter in optimizer.trainable]
    _add_gradients(optimizer.trainable, gradients, passes.replicas)
    norm = torch.nn.utils.clip_grad_norm_(optimizer.trainable, passes.settings.max_grad_norm)
    numbers = passes.read(computed, norm)
    return update_if_finite(optimizer, numbers, learning_rate=minibatch.learning_rate, name=name)


def update_if_finite(
    optimizer: PolicyOptimizer, numbers: UpdateNumbers, *, learning_rate: float, name: str
) -> UpdateNumbers:
    """Update by the gradients that there are, and return the numbers of it.

    Where the loss or the gradient is not finite, nothing changes, and there are no numbers.
    """
    if not all(map(isfinite, (*numbers.losses, *numbers.grad_norms))):
        loss, norm = numbers.losses, numbers.grad_norms
        logger.warning("%s skipped: loss %s, gradient norm %s", name, *loss, *norm)
        return UpdateNumbers()
    optimizer.update(learning_rate=learning_rate)
    return numbers


def forget_gradients(optimizer: PolicyOptimizer) -> None:
    for parameter in optimizer.trainable:
        parameter.grad = None


def _add_gradients(
    trainable: Sequence[nn.Parameter],
    gradients: Mapping[int, Sequence[Tensor | None]],
    replicas: ReplicaGroup,
) -> None:
    """Give each parameter the sum of the ranks' gradients, in the order of ranks.

    A rank has none of a parameter that its batch does not depend on; a parameter of which no rank
    has one is not updated.
    """
    flags = {
        rank: torch.tensor([gradient is not None for gradient in found])
        for rank, found in gradients.items()
    }
    has_gradient = torch.stack(replicas.gather(flags)).any(dim=0).tolist()
    for index, parameter in enumerate(trainable):
        parameter.grad = None
        if has_gradient[index]:
            mine = {rank: found[index] for rank, found in gradients.items()}
            zeros = torch.zeros_like(parameter)
            sent = {rank: zeros if grad is None else grad for rank, grad in mine.items()}
            parameter.grad = reduce(torch.add, replicas.gather(sent))
