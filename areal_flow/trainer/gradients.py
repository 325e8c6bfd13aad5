"""How the gradients of ranks that hold a whole model each become one: in the order of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from areal_flow.trainer.passes import RankNumbers
from areal_flow.trainer.replicas import ReplicaGroup


@dataclass(frozen=True, slots=True)
class RankGradient:
    """What one rank found in its batch of a minibatch."""

    numbers: RankNumbers
    gradients: list[Tensor | None]
    """One a trainable parameter; None where the batch does not depend on it."""


def add_gradients(
    trainable: Sequence[nn.Parameter],
    computed: Mapping[int, RankGradient],
    replicas: ReplicaGroup,
) -> None:
    """Give each parameter the sum of the ranks' gradients, in the order of ranks.

    A parameter of which no rank has a gradient is not updated.
    """
    flags = {
        rank: torch.tensor([gradient is not None for gradient in found.gradients])
        for rank, found in computed.items()
    }
    has_gradient = torch.stack(replicas.gather(flags)).any(dim=0).tolist()
    for index, parameter in enumerate(trainable):
        parameter.grad = None
        if has_gradient[index]:
            mine = {rank: found.gradients[index] for rank, found in computed.items()}
            zeros = torch.zeros_like(parameter)
            sent = {rank: zeros if grad is None else grad for rank, grad in mine.items()}
            parameter.grad = reduce(torch.add, replicas.gather(sent))
