"""The backend whose ranks hold the whole policy each, and AdamW over all that is trainable of it.

A rank computes the gradient of its batch; the ranks' gradients are added in the order of ranks, and
every rank makes the same update.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from areal_flow.config import TrainerSettings
from areal_flow.models.hashing import hash_tensors
from areal_flow.models.lora import without_adapter
from areal_flow.models.policy import (
    assign_tensors,
    merged_tensors,
    policy_tensors,
    recompute_layers,
)
from areal_flow.trainer.adamw import PolicyAdamW
from areal_flow.trainer.backend import Minibatch, SavedState, StepSettings, UpdateNumbers
from areal_flow.trainer.passes import Passes, RankNumbers, add_numbers
from areal_flow.trainer.replicas import ReplicaGroup
from areal_flow.trainer.sequences import MicroBatch
from areal_flow.types import PolicyHashes
from areal_flow.weights.channel import WeightsWriter, converted

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankGradient:
    """What one rank found in its batch of a minibatch."""

    numbers: RankNumbers
    gradients: list[Tensor | None]
    """One a trainable parameter; None where the batch does not depend on it."""


class ReplicatedBackend:
    """A `TrainerBackend`: the master policy, in training form, and its optimizer."""

    is_sharded = False

    def __init__(
        self, policy: Any, settings: TrainerSettings, _: ReplicaGroup | None = None
    ) -> None:
        self.policy = policy
        self.settings = settings
        if settings.activations == "recompute":
            recompute_layers(policy)
        self.optimizer = PolicyAdamW(policy.named_parameters(), settings)
        without = partial(_run_without_adapter, policy)
        self.passes = Passes(partial(_run, policy), settings, reference=without)
        self._has_reference = False

    def logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float) -> list[Tensor]:
        return [self.passes.logprobs(micro, temperature) for micro in micro_batches]

    @property
    def has_reference(self) -> bool:
        return self._has_reference

    def hold_reference(self, policy: Any) -> None:
        self._has_reference = True
        self.passes.reference = partial(_run, policy.requires_grad_(False))

    def update(
        self, minibatch: Minibatch, settings: StepSettings, replicas: ReplicaGroup
    ) -> UpdateNumbers:
        bound = self.passes.minibatch_bound(minibatch, settings, replicas)
        computed = {
            rank: self._gradient(minibatch, rank, settings, bound)
            for rank in minibatch.micro_batches
        }
        numbers = {rank: found.numbers for rank, found in computed.items()}
        loss, metrics = add_numbers(numbers, replicas)
        self._add_gradients(computed, replicas)
        trainable, max_norm = self.optimizer.trainable, self.settings.max_grad_norm
        grad_norm = float(torch.nn.utils.clip_grad_norm_(trainable, max_norm))
        if not (isfinite(loss) and isfinite(grad_norm)):
            logger.warning("update skipped: loss %s, gradient norm %s", loss, grad_norm)
            return UpdateNumbers()
        self.optimizer.update(learning_rate=minibatch.learning_rate)
        return UpdateNumbers([loss], [grad_norm], metrics)

    def export_weights(self) -> dict[str, Tensor]:
        return merged_tensors(self.policy)

    def stage(self, version: int, channel: WeightsWriter, *, dtype: torch.dtype) -> PolicyHashes:
        with ThreadPoolExecutor(1) as beside:
            weights_hash = beside.submit(self.fingerprint)
            served_hash = channel.stage(version, converted(self.export_weights(), dtype=dtype))
            return PolicyHashes(weights_hash.result(), served_hash)

    def save(self) -> SavedState:
        return SavedState(
            _copies(policy_tensors(self.policy)), _copies(self.optimizer.named_state())
        )

    def load(self, saved: SavedState) -> None:
        assign_tensors(self.policy, saved.weights)
        self.optimizer.load_named_state(saved.optimizer)

    def fingerprint(self) -> str:
        return hash_tensors(policy_tensors(self.policy))

    def _gradient(
        self, minibatch: Minibatch, rank: int, settings: StepSettings, bound: float | None
    ) -> RankGradient:
        """Return one rank's numbers and gradients, those of its micro-batches added up."""
        self.optimizer.zero_grad(set_to_none=True)
        numbers = self.passes.backward(minibatch, rank, settings, bound)
        return RankGradient(numbers, [p.grad for p in self.optimizer.trainable])

    def _add_gradients(self, computed: Mapping[int, RankGradient], replicas: ReplicaGroup) -> None:
        """Give each parameter the sum of the ranks' gradients, in the order of ranks.

        A parameter of which no rank has a gradient is not updated.
        """
        flags = {
            rank: torch.tensor([gradient is not None for gradient in found.gradients])
            for rank, found in computed.items()
        }
        has_gradient = torch.stack(replicas.gather(flags)).any(dim=0).tolist()
        for index, parameter in enumerate(self.optimizer.trainable):
            parameter.grad = None
            if has_gradient[index]:
                mine = {rank: found.gradients[index] for rank, found in computed.items()}
                zeros = torch.zeros_like(parameter)
                sent = {rank: zeros if grad is None else grad for rank, grad in mine.items()}
                parameter.grad = reduce(torch.add, replicas.gather(sent))


def _run(policy: Any, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
    return function(policy, *arguments, **keywords)


def _run_without_adapter(policy: Any, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
    with without_adapter(policy):
        return function(policy, *arguments, **keywords)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }
