"""A policy and its optimizer: everything that a step changes, and its identity."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor

from areal_flow.config import TrainerSettings
from areal_flow.models.hashing import hash_tensors
from areal_flow.models.policy import DTYPES, policy_tensors


class TrainerState:
    """The master policy, in training form, and AdamW over it."""

    def __init__(self, policy: Any, settings: TrainerSettings) -> None:
        self.policy = policy
        self.settings = settings
        self.optimizer = torch.optim.AdamW(
            policy.parameters(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )

    def autocast(self) -> torch.autocast:
        """Return the precision of forward passes; the master weights stay float32."""
        device_type = torch.device(self.settings.device).type
        return torch.autocast(
            device_type, DTYPES[self.settings.dtype], enabled=self.settings.dtype != "float32"
        )

    def learning_rate(self, step: int) -> float:
        """Return the rate of step 1, 2, ...: a linear warm-up, then constant."""
        warmup = self.settings.num_learning_rate_warmup_steps
        return self.settings.learning_rate * min(1.0, step / (warmup + 1))

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def tensors(self) -> dict[str, Tensor]:
        """Return the master weights by name."""
        return policy_tensors(self.policy)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's state by parameter name; empty before the first update."""
        names = {parameter: name for name, parameter in self.policy.named_parameters()}
        return {
            f"{names[parameter]}.{key}": value
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
        }

    def load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `optimizer_tensors` returned."""
        self.optimizer.state.clear()
        for name, parameter in self.policy.named_parameters():
            prefix = f"{name}."
            state = {
                key.removeprefix(prefix): value.to(
                    "cpu" if key.endswith(".step") else parameter.device, copy=True
                )
                for key, value in tensors.items()
                if key.startswith(prefix) and "." not in key.removeprefix(prefix)
            }
            if state:
                self.optimizer.state[parameter] = state

    def weights_hash(self) -> str:
        return hash_tensors(self.tensors())

    def optimizer_hash(self) -> str:
        return hash_tensors(self.optimizer_tensors())


def numeric_environment(settings: TrainerSettings, *, num_ranks: int) -> str:
    """Return, as JSON, what decides whether a replay can be equal bit for bit."""
    return json.dumps(
        {
            "torch": torch.__version__,
            "ranks": num_ranks,
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "mkldnn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
            "device": settings.device,
            "device_name": _device_name(settings.device),
            "dtype": settings.dtype,
            "machine": os.uname().machine,
        },
        sort_keys=True,
    )


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
