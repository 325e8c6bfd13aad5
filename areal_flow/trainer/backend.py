"""What a training step and a trainer rank need of whatever holds a policy and its optimizer.

It does not depend on how many copies or shards of the policy there are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from areal_flow.config import Recipe, TrainerSettings
from areal_flow.errors import ConfigError
from areal_flow.models.linear import onednn_is_faster
from areal_flow.settings import import_function
from areal_flow.trainer.critic import Critic
from areal_flow.trainer.passes import Passes
from areal_flow.trainer.replicas import ReplicaGroup, SingleProcess, context_ranks
from areal_flow.trainer.tensor_rows import RowsFile, TensorRows
from areal_flow.trainer.updates import Minibatch, UpdateNumbers
from areal_flow.types import PolicyHashes
from areal_flow.weights.channel import WeightsWriter

BACKENDS = {
    "replicated": "areal_flow.trainer.replicated:ReplicatedBackend",
    "fsdp": "areal_flow.trainer.sharded:ShardedBackend",
}
"""By the name that recipes use. The next one is a file, a line here and its tests."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """A copy of what a backend continues from, in main memory, by tensor name."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class SavedRows:
    """As `SavedState`: a rank's rows of a sharded backend."""

    weights: dict[str, TensorRows]
    optimizer: dict[str, TensorRows]


class TrainerBackend(Protocol):
    """A policy and its optimizer, wherever their parts are; not for concurrent use."""

    settings: TrainerSettings
    passes: Passes
    is_sharded: bool
    """Whether each rank holds a part of the tensors: what reads them is then for all ranks."""
    critic: Critic | None
    """What predicts values, for an algorithm that needs it."""
    has_reference: bool
    """Whether a policy was given to `hold_reference`. With an adapter none is needed: the reference
    is then the policy without it."""

    def update(self, minibatch: Minibatch) -> UpdateNumbers:
        """Make one optimizer update; all ranks make the same.

        Where the loss or the gradient is not finite, nothing changes, and there are no numbers.

        Raises:
            TrainerLost: another rank left meanwhile. Nothing may be computed any more.
        """

    def hold_reference(self, policy: Any) -> None:
        """Keep a policy, of any architecture with the same tokens, as the reference."""

    def export_weights(self) -> Mapping[str, Tensor]:
        """Return the weights to be served, by name and in master precision: an adapter is merged.

        The next update changes them.
        """

    def stage(self, version: int, channel: WeightsWriter, *, dtype: torch.dtype) -> PolicyHashes:
        """Write the weights aside, in the type that they are served in; return who they are."""

    def save(self) -> SavedState | SavedRows:
        """Return a copy of the state; the next update does not change it."""

    def load(self, saved: SavedState) -> None:
        """Continue from what `save` returned.

        Raises:
            WeightsError: it is of another policy.
        """

    def fingerprint(self) -> str:
        """Return the hash of the master weights."""


class LoadsRows(Protocol):
    """What a backend that is sharded has in place of `load`."""

    def load_rows(self, weights: RowsFile, optimizer: RowsFile) -> None:
        """Continue from the rows that `save` returned on all ranks, however many there were.

        Raises:
            WeightsError: they are of another policy.
        """


def backend_name(settings: TrainerSettings, replicas: ReplicaGroup) -> str:
    """Return which backend a rank has: one that is alone holds its policy whole."""
    return "replicated" if replicas.is_alone else settings.backend


def make_backend(
    policy: Any, settings: TrainerSettings, replicas: ReplicaGroup | None = None
) -> TrainerBackend:
    replicas = replicas or SingleProcess()
    path = BACKENDS[backend_name(settings, replicas)]
    backend = import_function(path, setting="trainer.backend", error=ConfigError)
    return backend(policy, settings, replicas)  # type: ignore[no-any-return]


def numeric_environment(recipe: Recipe, replicas: ReplicaGroup) -> str:
    """Return, as JSON, what decides whether a replay can be equal bit for bit."""
    device, backend = recipe.trainer.device, backend_name(recipe.trainer, replicas)
    context = context_ranks(replicas, recipe.trainer)
    environment = {
        "torch": torch.__version__,
        "ranks": recipe.cluster.num_trainers,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        "device": device,
        "device_name": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "dtype": recipe.trainer.dtype,
        "machine": os.uname().machine,
        **({"linear_layers": "onednn"} if onednn_is_faster() else {}),
        **({"backend": backend} if backend != "replicated" else {}),
        **({"context_ranks": context} if context > 1 else {}),
    }
    return json.dumps(environment, sort_keys=True)
