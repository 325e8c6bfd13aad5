"""How the gradients of ranks that hold a whole model each become one: in the order of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import isfinite

import torch
from torch import Tensor, nn

from areal_flow.trainer.adamw import PolicyAdamW
from areal_flow.trainer.passes import RankNumbers, add_numbers
from areal_flow.trainer.replicas import ReplicaGroup
from areal_flow.trainer.updates import Minibatch, UpdateNumbers

logger = logging.getLogger(__name__)


def update_whole(
    optimizer: PolicyAdamW,
    backward: Callable[[int], RankNumbers],
    minibatch: Minibatch,
    *,
    max_grad_norm: float,
    name: str,
) -> UpdateNumbers:
    """Update a model that each rank holds whole by all ranks' gradients.

    Where the loss or the gradient is not finite, nothing changes, and there are no numbers.
    """
    numbers, gradients, replicas = {}, {}, minibatch.settings.group
    for rank in minibatch.micro_batches:
        optimizer.zero_grad(set_to_none=True)
        numbers[rank] = backward(rank)
        gradients[rank] = [parameter.grad for parameter in optimizer.trainable]
    loss, metrics = add_numbers(numbers, replicas)
    add_gradients(optimizer.trainable, gradients, replicas)
    grad_norm = float(torch.nn.utils.clip_grad_norm_(optimizer.trainable, max_grad_norm))
    if not (isfinite(loss) and isfinite(grad_norm)):
        logger.warning("%s skipped: loss %s, gradient norm %s", name, loss, grad_norm)
        return UpdateNumbers()
    optimizer.update(learning_rate=minibatch.learning_rate)
    return UpdateNumbers([loss], [grad_norm], metrics)


def add_gradients(
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
