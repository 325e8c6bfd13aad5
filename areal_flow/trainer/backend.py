"""What a training step and a trainer rank need of whatever holds a policy and its optimizer.

It refuses to know how many copies or shards of the policy there are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from areal_flow.algorithms.protocol import Advantage, Algorithm, Metric, MinibatchSize, TokenLoss
from areal_flow.config import Recipe, TrainerSettings
from areal_flow.errors import ConfigError
from areal_flow.models.linear import onednn_is_faster
from areal_flow.settings import import_function
from areal_flow.trainer.replicas import ReplicaGroup, SingleProcess
from areal_flow.trainer.sequences import MicroBatch
from areal_flow.trainer.tensor_rows import RowsFile, TensorRows
from areal_flow.types import PolicyHashes
from areal_flow.weights.channel import WeightsWriter

if TYPE_CHECKING:
    from areal_flow.trainer.critic import Critic

BACKENDS = {
    "replicated": "areal_flow.trainer.replicated:ReplicatedBackend",
    "fsdp": "areal_flow.trainer.sharded:ShardedBackend",
}
"""By the name that recipes use. The next one is a file, a line here and its tests."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What a step needs beside the policy and the sequences."""

    algorithm: Algorithm
    temperature: float
    seed: int
    num_ranks: int = 1
    """Among which a minibatch is dealt."""
    context_ranks: int = 1
    """Processes that are one such rank together: they share the tokens of its micro-batches."""
    loss: TokenLoss | None = None
    """Minimised instead of the algorithm's own."""
    packs_groups: bool = False
    """Whether a group's sequences lie side by side in one micro-batch, for a loss of them all."""

    @property
    def token_loss(self) -> TokenLoss:
        return self.loss or self.algorithm.loss

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss reads proximal log-probabilities, as one that is not known may."""
        return self.loss is not None or self.algorithm.needs_proximal


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What one optimizer update computes."""

    micro_batches: Mapping[int, Sequence[MicroBatch]]
    """By rank, of the ranks that this process computes."""
    size: MinibatchSize
    learning_rate: float
    policy_version: int = 0
    """Of the policy before the step."""


@dataclass(slots=True)
class UpdateNumbers:
    """What updates found, each of a minibatch: of one, or of all of a step but the skipped ones."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    metrics: dict[str, Metric] = field(default_factory=dict)
    advantages: list[Advantage] = field(default_factory=list, compare=False)
    """Of a step, one a trajectory; arrays cannot be compared as the rest is."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """A copy of everything that a backend continues from, in main memory, by tensor name."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class SavedRows:
    """As `SavedState`, of a backend that is sharded: a rank's rows."""

    weights: dict[str, TensorRows]
    optimizer: dict[str, TensorRows]


class TrainerBackend(Protocol):
    """A policy and its optimizer, wherever their parts are; not for concurrent use."""

    settings: TrainerSettings
    is_sharded: bool
    """Whether each rank holds a part of the tensors: what reads them is then for all ranks."""
    critic: Critic | None
    """What predicts values, for an algorithm that needs it."""

    def logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float) -> list[Tensor]:
        """Return the log-probabilities of the trained tokens, without gradient."""

    def reference_logprobs(self, micro: MicroBatch, *, temperature: float) -> Tensor:
        """Return the same of one micro-batch under the reference policy."""

    def update(
        self, minibatch: Minibatch, settings: StepSettings, replicas: ReplicaGroup
    ) -> UpdateNumbers:
        """Make one optimizer update; all ranks make the same.

        Where the loss or the gradient is not finite, nothing changes, and there are no numbers.

        Raises:
            TrainerLost: another rank left meanwhile. Nothing may be computed any more.
        """

    @property
    def has_reference(self) -> bool:
        """Whether there is a policy for losses that need the log-probabilities of a fixed one.

        With an adapter there always is: the policy without it.
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
    """Return the backend that a recipe names, with a fresh optimizer over this policy."""
    replicas = replicas or SingleProcess()
    path = BACKENDS[backend_name(settings, replicas)]
    backend = import_function(path, setting="trainer.backend", error=ConfigError)
    return backend(policy, settings, replicas)  # type: ignore[no-any-return]


def numeric_environment(recipe: Recipe, replicas: ReplicaGroup) -> str:
    """Return, as JSON, what decides whether a replay can be equal bit for bit."""
    device, backend = recipe.trainer.device, backend_name(recipe.trainer, replicas)
    context = 1 if replicas.is_alone else recipe.trainer.parallel.context_ranks
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
