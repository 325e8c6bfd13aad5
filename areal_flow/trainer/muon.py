"""Muon over the matrices of a policy's layers, and AdamW over all else: embeddings, head, norms.

(Jordan et al., "Muon", 2024; Liu et al., arXiv 2502.16982.) An update is made as long as AdamW's
would be, so that rate and weight decay mean what they mean there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import unwrap

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from areal_flow.config import TrainerSettings
from areal_flow.trainer.adamw import PolicyAdamW
from areal_flow.trainer.ranked_model import whole
from areal_flow.trainer.tensor_rows import is_sharded, local_rows

KEY = "momentum_buffer"


class PolicyMuon:
    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], settings: TrainerSettings
    ) -> None:
        named = {name: p for name, p in parameters if p.requires_grad}
        self.trainable = list(named.values())
        self._weight_decay = settings.adamw.weight_decay
        self._matrices = {name: p for name, p in named.items() if is_of_layers(name, p)}
        self._momenta: dict[str, Tensor] = {}
        others = [(name, p) for name, p in named.items() if name not in self._matrices]
        self._others = PolicyAdamW(others, settings)

    def update(self, *, learning_rate: float) -> None:
        for name, parameter in self._matrices.items():
            if parameter.grad is not None:
                momentum = self._momenta.setdefault(name, torch.zeros_like(parameter.grad))
                self._update_matrix(parameter, momentum, learning_rate)
        self._others.update(learning_rate=learning_rate)

    def _update_matrix(self, parameter: nn.Parameter, momentum: Tensor, rate: float) -> None:
        """Of rows on several ranks each rank updates the whole matrix, and keeps its own rows."""
        assert parameter.grad is not None
        matrix, whole_momentum = nn.Parameter(whole(parameter.detach())), whole(momentum)
        matrix.grad = whole(parameter.grad)
        decay = self._weight_decay
        muon = _Muon([matrix], lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        muon.state[matrix][KEY] = whole_momentum
        muon.step()  # type: ignore[no-untyped-call]
        _take_rows(parameter.detach(), matrix.detach())
        _take_rows(momentum, whole_momentum)

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


class _Muon(torch.optim.Muon):
    add_param_group = unwrap(Optimizer.add_param_group)  # see `adamw`


def is_of_layers(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix of one of the layers, which are numbered."""
    return parameter.ndim == 2 and any(part.isdigit() for part in name.split("."))


def _take_rows(tensor: Tensor, matrix: Tensor) -> None:
    """Copy this rank's rows; without ranks the two are one tensor."""
    if is_sharded(tensor):
        rows, first_row = local_rows(tensor)
        rows.copy_(matrix[first_row : first_row + len(rows)])
