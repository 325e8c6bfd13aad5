"""The backend whose ranks hold the whole policy each, and AdamW over all that is trainable of it.

A rank computes the gradient of its batch; the ranks' gradients are added in the order of ranks, and
every rank makes the same update.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import reduce
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from areal_flow.algorithms.protocol import (
    LossInputs,
    Metric,
    PolicyLoss,
    add_metrics,
    mean,
)
from areal_flow.config import TrainerSettings
from areal_flow.models.hashing import hash_tensors
from areal_flow.models.lora import split_adapter, without_adapter
from areal_flow.models.policy import (
    DTYPES,
    assign_tensors,
    merged_tensors,
    policy_tensors,
    recompute_layers,
)
from areal_flow.trainer.adamw import UncompiledAdamW
from areal_flow.trainer.backend import Minibatch, SavedState, StepSettings, UpdateNumbers
from areal_flow.trainer.head import token_logprobs, token_logprobs_and_entropies
from areal_flow.trainer.replicas import ReplicaGroup
from areal_flow.trainer.sequences import MicroBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankGradient:
    """What one rank found in its batch of a minibatch."""

    loss: float
    metrics: dict[str, Metric]
    gradients: list[Tensor | None]
    """One a trainable parameter; None where the batch does not depend on it."""


class ReplicatedBackend:
    """A `TrainerBackend`: the master policy, in training form, and its optimizer."""

    def __init__(self, policy: Any, settings: TrainerSettings) -> None:
        self.policy = policy
        self.settings = settings
        if settings.activations == "recompute":
            recompute_layers(policy)
        # AdamW moves what has a gradient of zero, too: by weight decay and by older moments. So it
        # never sees a frozen parameter.
        trainable = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self._trainable = list(trainable.values())
        matrices = {name: p for name, p in trainable.items() if p.ndim > 1}
        others = {name: p for name, p in trainable.items() if p.ndim <= 1}  # of norms, and biases
        self._names = [*matrices, *others]
        groups: list[dict[str, Any]] = [
            {"params": list(matrices.values())},
            {"params": list(others.values()), "weight_decay": 0.0},
        ]
        self.optimizer = UncompiledAdamW(
            groups,
            lr=settings.learning_rate,
            betas=(settings.adamw.beta1, settings.adamw.beta2),
            weight_decay=settings.adamw.weight_decay,
            fused=torch.device(settings.device).type == "cuda" or None,
        )
        self._has_adapter = bool(split_adapter(policy_tensors(policy))[1])
        self._reference: Any = None

    def autocast(self) -> torch.autocast:
        """Return the precision of forward passes; the master weights stay float32."""
        device_type = torch.device(self.settings.device).type
        return torch.autocast(
            device_type, DTYPES[self.settings.dtype], enabled=self.settings.dtype != "float32"
        )

    def _saved_activations(self) -> AbstractContextManager[object]:
        if self.settings.activations != "offload":
            return nullcontext()
        on_gpu = torch.device(self.settings.device).type == "cuda"
        return torch.autograd.graph.save_on_cpu(pin_memory=on_gpu)

    def logprobs(self, micro_batches: Sequence[MicroBatch], *, temperature: float) -> list[Tensor]:
        return [self._logprobs_under(self.policy, m, temperature) for m in micro_batches]

    @torch.no_grad()
    def _logprobs_under(self, policy: Any, micro: MicroBatch, temperature: float) -> Tensor:
        with self.autocast():
            return token_logprobs(policy, micro, temperature=temperature)

    def _reference_logprobs(self, micro: MicroBatch, temperature: float) -> Tensor:
        if not self._has_adapter:
            return self._logprobs_under(self._reference, micro, temperature)
        with without_adapter(self.policy):
            return self._logprobs_under(self.policy, micro, temperature)

    @property
    def has_reference(self) -> bool:
        return self._has_adapter or self._reference is not None

    def hold_reference(self, weights: Mapping[str, Tensor]) -> None:
        reference = deepcopy(self.policy).requires_grad_(False)
        assign_tensors(reference, weights)
        self._reference = reference

    def update(
        self, minibatch: Minibatch, settings: StepSettings, replicas: ReplicaGroup
    ) -> UpdateNumbers:
        bound = self._minibatch_bound(minibatch, settings, replicas)
        computed = {
            rank: self._gradient(minibatch, rank, settings, bound)
            for rank in minibatch.micro_batches
        }
        loss, metrics = _add_numbers(computed, replicas)
        self._add_gradients(computed, replicas)
        grad_norm = float(
            torch.nn.utils.clip_grad_norm_(self._trainable, self.settings.max_grad_norm)
        )
        if not (isfinite(loss) and isfinite(grad_norm)):
            logger.warning("update skipped: loss %s, gradient norm %s", loss, grad_norm)
            return UpdateNumbers()
        for group in self.optimizer.param_groups:
            group["lr"] = minibatch.learning_rate
        self.optimizer.step()
        return UpdateNumbers([loss], [grad_norm], metrics)

    def export_weights(self) -> dict[str, Tensor]:
        return merged_tensors(self.policy)

    def save(self) -> SavedState:
        return SavedState(_copies(policy_tensors(self.policy)), _copies(self.optimizer_tensors()))

    def load(self, saved: SavedState) -> None:
        assign_tensors(self.policy, saved.weights)
        self.load_optimizer_tensors(saved.optimizer)

    def fingerprint(self) -> str:
        return hash_tensors(policy_tensors(self.policy))

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's state by parameter name; empty before the first update."""
        return {
            f"{self._names[index]}.{key}": value
            for index, state in self.optimizer.state_dict()["state"].items()
            for key, value in state.items()
        }

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back a copy of what `optimizer_tensors` returned, each part where AdamW needs it."""
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            parameter, _, key = name.rpartition(".")
            state.setdefault(self._names.index(parameter), {})[key] = value.clone()
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})

    def _minibatch_bound(
        self, minibatch: Minibatch, settings: StepSettings, replicas: ReplicaGroup
    ) -> float | None:
        """Return what an algorithm must know of all of a minibatch's tokens: one for all ranks."""
        if not settings.algorithm.needs_minibatch_bound:
            return None
        sent = {}
        for rank, micro_batches in minibatch.micro_batches.items():
            # Ranks exchange tensors of one shape; what is not a token is not a number.
            sent[rank] = torch.full((2, minibatch.size.num_tokens), torch.nan)
            at = 0
            for micro in micro_batches:
                logprobs_M = self._logprobs_under(self.policy, micro, settings.temperature)
                log_ratio_M = logprobs_M - micro.behavior_logprobs_M
                end = at + len(log_ratio_M)
                sent[rank][:, at:end] = torch.stack([log_ratio_M, micro.advantages_M])
                at = end
        tokens_2N = torch.cat(replicas.gather(sent), dim=1)
        log_ratio_N, advantages_N = tokens_2N[:, ~tokens_2N[1].isnan()]
        return settings.algorithm.minibatch_bound(log_ratio_N, advantages_N)

    def _gradient(
        self, minibatch: Minibatch, rank: int, settings: StepSettings, bound: float | None
    ) -> RankGradient:
        """Return one rank's numbers and gradients, those of its micro-batches added up."""
        self.optimizer.zero_grad(set_to_none=True)
        total, metrics = 0.0, dict[str, Metric]()
        micro_batches, size = minibatch.micro_batches[rank], minibatch.size
        for micro in micro_batches:
            with self._saved_activations():
                inputs = self._loss_inputs(micro, settings, minibatch.policy_version, bound)
                found = _with_entropy(settings.token_loss(inputs), inputs.entropy_T)
            loss = settings.algorithm.aggregate(found.losses_T, micro.sequence_M, size)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            metrics = add_metrics(metrics, found.metrics)
        if not micro_batches:
            metrics = _metrics_of_nothing(settings)
        return RankGradient(total, metrics, [p.grad for p in self._trainable])

    def _loss_inputs(
        self, micro: MicroBatch, settings: StepSettings, version: int, bound: float | None
    ) -> LossInputs:
        temperature, proximal_M = settings.temperature, micro.proximal_logprobs_M
        reference_M = None
        if settings.algorithm.needs_reference:
            reference_M = self._reference_logprobs(micro, temperature)
        with self.autocast():
            logprobs_M, entropy_M = token_logprobs_and_entropies(
                self.policy,
                micro,
                temperature=temperature,
                entropy_has_gradient=settings.algorithm.needs_entropy,
            )
        return LossInputs(
            logprobs_T=logprobs_M,
            proximal_logprobs_T=logprobs_M.detach() if proximal_M is None else proximal_M,
            behavior_logprobs_T=micro.behavior_logprobs_M,
            advantages_T=micro.advantages_M,
            sequence_T=micro.sequence_M,
            versions_T=micro.versions_M,
            entropy_T=entropy_M,
            reference_logprobs_T=reference_M,
            policy_version=version,
            minibatch_bound=bound,
        )

    def _add_gradients(self, computed: Mapping[int, RankGradient], replicas: ReplicaGroup) -> None:
        """Give each parameter the sum of the ranks' gradients, in the order of ranks.

        A parameter of which no rank has a gradient is not updated.
        """
        flags = {
            rank: torch.tensor([gradient is not None for gradient in found.gradients])
            for rank, found in computed.items()
        }
        has_gradient = torch.stack(replicas.gather(flags)).any(dim=0).tolist()
        for index, parameter in enumerate(self._trainable):
            parameter.grad = None
            if has_gradient[index]:
                mine = {rank: found.gradients[index] for rank, found in computed.items()}
                zeros = torch.zeros_like(parameter)
                sent = {rank: zeros if grad is None else grad for rank, grad in mine.items()}
                parameter.grad = reduce(torch.add, replicas.gather(sent))


def _add_numbers(
    computed: Mapping[int, RankGradient], replicas: ReplicaGroup
) -> tuple[float, dict[str, Metric]]:
    """Return the minibatch's loss and metrics, those of its ranks added up."""
    kinds = next(iter(computed.values())).metrics
    names = sorted(kinds)
    sent = {}
    for rank, found in computed.items():
        metrics = [found.metrics[name] for name in names]
        numbers = [(m.total, m.weight or 0.0, m.squares or 0.0) for m in metrics]
        sent[rank] = torch.tensor([(found.loss, 1.0, 0.0), *numbers], dtype=torch.float64)
    loss, added = 0.0, dict[str, Metric]()
    for (rank_loss, _, _), *numbers in (tensor.tolist() for tensor in replicas.gather(sent)):
        loss += rank_loss
        of_rank = {
            name: Metric(
                total,
                None if kinds[name].weight is None else weight,
                None if kinds[name].squares is None else squares,
            )
            for name, (total, weight, squares) in zip(names, numbers, strict=True)
        }
        added = add_metrics(added, of_rank)
    return loss, added


def _metrics_of_nothing(settings: StepSettings) -> dict[str, Metric]:
    """Return the loss's metrics of no token: ranks without work name the same as the others."""
    real_T, integer_T = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    inputs = LossInputs(real_T, real_T, real_T, real_T, integer_T, integer_T, real_T, real_T)
    return dict(_with_entropy(settings.token_loss(inputs), real_T).metrics)


def _with_entropy(loss: PolicyLoss, entropy_M: Tensor | None) -> PolicyLoss:
    """Return a loss that also shows the policy's entropy on its tokens, in nats."""
    assert entropy_M is not None, "a trainer always gives it"
    return replace(loss, metrics={**loss.metrics, "entropy_mean": mean(entropy_M)})


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }
