"""AdamW over the named parameters of a policy.

The methods of torch's optimizers are wrapped for its compiler and import it when they are called,
which takes a second of every trainer's start: here they are unwrapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from areal_flow.training.settings import TrainerSettings


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
