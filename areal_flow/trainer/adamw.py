"""AdamW over the named parameters of a policy, and updates by the gradients of all ranks.

The methods of torch's optimizers are wrapped for its compiler and import it when they are called,
which takes a second of every trainer's start: here they are unwrapped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from inspect import unwrap
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from areal_flow.config import TrainerSettings
from areal_flow.trainer.passes import Passes, RankNumbers
from areal_flow.trainer.replicas import ReplicaGroup
from areal_flow.trainer.updates import Minibatch, UpdateNumbers

logger = logging.getLogger(__name__)


class PolicyAdamW(torch.optim.AdamW):
    """AdamW with a state by parameter name; norms and biases have no weight decay."""

    step = torch.no_grad()(unwrap(Adam.step))
    zero_grad = unwrap(Optimizer.zero_grad)
    add_param_group = unwrap(Optimizer.add_param_group)
    state_dict = unwrap(Optimizer.state_dict)
    load_state_dict = unwrap(Optimizer.load_state_dict)

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], settings: TrainerSettings
    ) -> None:
        # Without those that are frozen: AdamW moves what has a gradient of zero, too.
        trainable = {name: p for name, p in parameters if p.requires_grad}
        matrices = {name: p for name, p in trainable.items() if p.ndim > 1}
        others = {name: p for name, p in trainable.items() if p.ndim <= 1}
        self.trainable = list(trainable.values())
        self._names = [*matrices, *others]
        groups: list[dict[str, Any]] = [
            {"params": list(matrices.values())},
            {"params": list(others.values()), "weight_decay": 0.0},
        ]
        super().__init__(
            groups,
            lr=settings.learning_rate,
            betas=settings.adamw.betas,
            weight_decay=settings.adamw.weight_decay,
            fused=torch.device(settings.device).type == "cuda" or None,
        )

    def update(self, *, learning_rate: float) -> None:
        for group in self.param_groups:
            group["lr"] = learning_rate
        self.step()

    def named_state(self) -> dict[str, Tensor]:
        return {
            f"{self._names[index]}.{key}": value
            for index, state in self.state_dict()["state"].items()
            for key, value in state.items()
        }

    def load_named_state(self, tensors: Mapping[str, Tensor]) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            parameter, _, key = name.rpartition(".")
            state.setdefault(self._names.index(parameter), {})[key] = value.clone()
        self.load_state_dict({**self.state_dict(), "state": state})


def update_whole(
    optimizer: PolicyAdamW,
    passes: Passes,
    backward: Callable[[int], RankNumbers],
    minibatch: Minibatch,
    *,
    name: str,
) -> UpdateNumbers:
    """Update a model that each rank holds whole by all ranks' gradients.

    Where the loss or the gradient is not finite, nothing changes, and there are no numbers.
    """
    numbers, gradients = {}, {}
    for rank in minibatch.micro_batches:
        optimizer.zero_grad(set_to_none=True)
        numbers[rank] = backward(rank)
        gradients[rank] = [parameter.grad for parameter in optimizer.trainable]
    loss, metrics = passes.add_numbers(numbers)
    _add_gradients(optimizer.trainable, gradients, passes.replicas)
    max_norm = passes.settings.max_grad_norm
    grad_norm = float(torch.nn.utils.clip_grad_norm_(optimizer.trainable, max_norm))
    if not (isfinite(loss) and isfinite(grad_norm)):
        logger.warning("%s skipped: loss %s, gradient norm %s", name, loss, grad_norm)
        return UpdateNumbers()
    optimizer.update(learning_rate=minibatch.learning_rate)
    return UpdateNumbers([loss], [grad_norm], metrics)


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
