"""The backend whose ranks hold the whole policy each, and AdamW over all that is trainable of it.

The gradients of the ranks' batches are added in the order of ranks: all make the same update.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from areal_flow.algorithms.actor_critic import ActorCriticPPO
from areal_flow.config import TrainerSettings
from areal_flow.models.hashing import hash_tensors
from areal_flow.models.lora import without_adapter
from areal_flow.models.policy import (
    assign_tensors,
    merged_tensors,
    policy_tensors,
    recompute_layers,
)
from areal_flow.trainer.backend import SavedState
from areal_flow.trainer.context import over_ranks
from areal_flow.trainer.critic import PREFIX, Critic
from areal_flow.trainer.optimizers import make_optimizer, update_whole
from areal_flow.trainer.passes import Passes, run_on
from areal_flow.trainer.replicas import ReplicaGroup, SingleProcess
from areal_flow.trainer.updates import Minibatch, UpdateNumbers
from areal_flow.types import PolicyHashes
from areal_flow.weights.channel import WeightsWriter, converted


class ReplicatedBackend:
    """A `TrainerBackend`: the master policy, in training form, and its optimizer."""

    is_sharded = False

    def __init__(
        self, policy: Any, settings: TrainerSettings, replicas: ReplicaGroup | None = None
    ) -> None:
        self.policy = policy
        self.settings = settings
        if settings.activations == "recompute":
            recompute_layers(policy)
        self.optimizer = make_optimizer(policy.named_parameters(), settings)
        run, without = partial(run_on, policy), partial(_run_without_adapter, policy)
        replicas = replicas or SingleProcess()
        shared = partial(over_ranks, settings=settings, replicas=replicas)
        self._over_ranks = shared
        self.passes = Passes(shared(run), settings, replicas, reference=shared(without))
        self.has_reference = False
        self.critic: Critic | None = None

    def add_critic(self, algorithm: ActorCriticPPO) -> None:
        self.critic = Critic(self.policy, self.settings, algorithm, self.passes.replicas)

    def hold_reference(self, policy: Any) -> None:
        self.has_reference = True
        self.passes.reference = self._over_ranks(partial(run_on, policy.requires_grad_(False)))

    def update(self, minibatch: Minibatch) -> UpdateNumbers:
        bound = self.passes.minibatch_bound(minibatch)
        return update_whole(
            self.optimizer,
            self.passes,
            lambda rank: self.passes.backward(minibatch, rank, bound),
            minibatch,
            name="update",
        )

    def export_weights(self) -> dict[str, Tensor]:
        return merged_tensors(self.policy)

    def stage(self, version: int, channel: WeightsWriter, *, dtype: torch.dtype) -> PolicyHashes:
        with ThreadPoolExecutor(1) as beside:
            weights_hash = beside.submit(self.fingerprint)
            served_hash = channel.stage(version, converted(self.export_weights(), dtype=dtype))
            return PolicyHashes(weights_hash.result(), served_hash)

    def save(self) -> SavedState:
        critic = self.critic.named_state() if self.critic else {}
        optimizer = {**self.optimizer.named_state(), **critic}
        return SavedState(_copies(policy_tensors(self.policy)), _copies(optimizer))

    def load(self, saved: SavedState) -> None:
        assign_tensors(self.policy, saved.weights)
        critic = {n: tensor for n, tensor in saved.optimizer.items() if n.startswith(PREFIX)}
        own = {n: tensor for n, tensor in saved.optimizer.items() if n not in critic}
        self.optimizer.load_named_state(own)
        if self.critic:
            self.critic.load_named_state(critic)

    def fingerprint(self) -> str:
        return hash_tensors(policy_tensors(self.policy))


def _run_without_adapter(policy: Any, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
    with without_adapter(policy):
        return function(policy, *arguments, **keywords)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }
