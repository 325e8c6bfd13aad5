"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor, nn

from areal_flow.core.errors import ConfigError
from areal_flow.core.settings import import_function
from areal_flow.training.settings import TrainerSettings

OPTIMIZERS = {
    "adamw": "areal_flow.training.adamw:PolicyAdamW",
    "muon": "areal_flow.training.muon:PolicyMuon",
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
