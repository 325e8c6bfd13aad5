"""Optimizers by name: AdamW, and Muon, over the named parameters of a policy.

Letters: R rows and C columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from areal_flow.policy.models.policy import DTYPES
from areal_flow.training.settings import TrainerSettings
from areal_flow.training.tensor_rows import full_tensor, local_rows

KEY = "momentum_buffer"
MOMENTUM = 0.95
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of the Newton-Schulz iteration (Jordan et al.)."""
NUM_ITERATIONS = 5


class PolicyOptimizer(Protocol):
    """Moves the parameters of a policy that are not frozen: all rows of them, or this rank's."""

    trainable: list[nn.Parameter]

    def update(self, *, learning_rate: float) -> None:
        """Update the parameters that have a gradient."""

    def named_state(self) -> dict[str, Tensor]:
        """Return the state: `PARAMETER.KEY` of each parameter's, shaped as it is or a scalar."""

    def load_named_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `named_state` returned."""


class PolicyAdamW(torch.optim.AdamW):
    """AdamW with a state by parameter name; norms and biases have no weight decay."""

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


class PolicyMuon:
    """Muon over the matrices of a policy's layers, AdamW over all else: embeddings, head, norms.

    (Jordan et al., "Muon", 2024; Liu et al., arXiv 2502.16982.) An update is made as long as
    AdamW's would be, so that rate and weight decay mean what they mean there. This is
    `torch.optim.Muon`, but for the type that it orthogonalises in: torch's is always bfloat16,
    which turns the last bits of a float32 gradient into 1% of an update.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], settings: TrainerSettings
    ) -> None:
        named = {name: p for name, p in parameters if p.requires_grad}
        self.trainable = list(named.values())
        self._weight_decay = settings.adamw.weight_decay
        self._dtype = DTYPES[settings.dtype]
        self._matrices = {name: p for name, p in named.items() if is_layer_matrix(name, p)}
        self._momenta: dict[str, Tensor] = {}
        others = [(name, p) for name, p in named.items() if name not in self._matrices]
        self._others = PolicyAdamW(others, settings)

    def update(self, *, learning_rate: float) -> None:
        for name, parameter in self._matrices.items():
            if parameter.grad is not None:
                momentum = self._momenta.setdefault(name, torch.zeros_like(parameter.grad))
                self._update_matrix(parameter, momentum, learning_rate)
        self._others.update(learning_rate=learning_rate)

    @torch.no_grad()
    def _update_matrix(self, parameter: nn.Parameter, momentum: Tensor, rate: float) -> None:
        """Update the full matrix, even if it is sharded, and keep this rank's rows."""
        assert parameter.grad is not None
        matrix_RC, momentum_RC = full_tensor(parameter.detach()), full_tensor(momentum)
        gradient_RC = full_tensor(parameter.grad)
        momentum_RC.lerp_(gradient_RC, 1 - MOMENTUM)
        update_RC = orthogonal(gradient_RC.lerp(momentum_RC, MOMENTUM).to(self._dtype))
        matrix_RC.mul_(1 - rate * self._weight_decay)
        matrix_RC.add_(update_RC, alpha=-rate * 0.2 * max(matrix_RC.shape) ** 0.5)
        _take_rows(parameter.detach(), matrix_RC)
        _take_rows(momentum, momentum_RC)

    def named_state(self) -> dict[str, Tensor]:
        own = {f"{name}.{KEY}": momentum for name, momentum in self._momenta.items()}
        return own | self._others.named_state()

    def load_named_state(self, tensors: Mapping[str, Tensor]) -> None:
        own = {name: tensor for name, tensor in tensors.items() if name.endswith(f".{KEY}")}
        self._momenta.clear()
        for name, tensor in own.items():
            parameter = name.removesuffix(f".{KEY}")
            device = self._matrices[parameter].device
            self._momenta[parameter] = tensor.to(device, copy=True)
        self._others.load_named_state({n: t for n, t in tensors.items() if n not in own})


def orthogonal(matrix_RC: Tensor) -> Tensor:
    """Return a matrix with the singular vectors of another, and singular values near 1.

    Newton-Schulz: X <- a X + b (X X^T) X + c (X X^T)^2 X, from X / |X| (Jordan et al.).
    """
    if len(matrix_RC) > matrix_RC.shape[1]:
        return orthogonal(matrix_RC.T).T
    a, b, c = COEFFICIENTS
    matrix_RC = matrix_RC / matrix_RC.norm().clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram_RR = matrix_RC @ matrix_RC.T
        change_RR = torch.addmm(gram_RR, gram_RR, gram_RR, beta=b, alpha=c)
        matrix_RC = torch.addmm(matrix_RC, change_RR, matrix_RC, beta=a)
    return matrix_RC


def is_layer_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix of one of the layers, which are numbered."""
    return parameter.ndim == 2 and any(part.isdigit() for part in name.split("."))


def _take_rows(tensor: Tensor, matrix: Tensor) -> None:
    """Copy this rank's rows; in a single process both are one tensor."""
    if isinstance(tensor, DTensor):
        rows, first_row = local_rows(tensor)
        rows.copy_(matrix[first_row : first_row + len(rows)])


OPTIMIZERS: Mapping[str, Callable[..., PolicyOptimizer]] = {
    "adamw": PolicyAdamW,
    "muon": PolicyMuon,
}
"""By the name that recipes use. The next one is a class, an entry here and in `settings`, tests."""
