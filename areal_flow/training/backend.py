"""A policy and its optimizer as one rank has them, with what a step needs of them.

It does not depend on which architecture the policy has, and hardly on how many ranks share it.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from areal_flow.algorithms.registry import ActorCriticPPO
from areal_flow.core.types import PolicyHashes
from areal_flow.policy.checkpoints import RNG_STATE
from areal_flow.policy.models.hashing import TensorHash, hash_tensors, hashing_threads
from areal_flow.policy.models.linear import multiplies_bfloat16, onednn_is_faster
from areal_flow.policy.models.lora import (
    merge_adapter,
    scale_adapter,
    split_adapter,
    without_adapter,
)
from areal_flow.policy.weights.channel import StreamedTensors, WeightsWriter
from areal_flow.policy.weights.device_copies import DeviceCopier
from areal_flow.training.critic import PREFIX, Critic
from areal_flow.training.head import token_logprobs
from areal_flow.training.kernels import set_precision
from areal_flow.training.optimizers import PolicyOptimizer
from areal_flow.training.ranked_model import Copies, RankedModel, TrainedModel, wait_for_copies
from areal_flow.training.replicas import ReplicaGroup, context_ranks
from areal_flow.training.sequences import MicroBatch
from areal_flow.training.settings import RankSettings, TrainerSettings
from areal_flow.training.tensor_rows import (
    TensorReaders,
    TensorRows,
    copied_rows,
    full_tensor,
    own_rows,
)

NO_HASH = "-" * 32
NO_HASHES = f"{NO_HASH} {NO_HASH}"
"""As long as the leader's: other ranks send them and receive its own."""

SavedState = tuple[dict[str, TensorRows], dict[str, TensorRows]]
"""This process's rows of the weights, and of the optimizer."""


class TrainerBackend:
    """A policy with its optimizer, reference and critic, or this rank's rows of them.

    All ranks call the same methods in the same order. Not for concurrent use.
    """

    def __init__(
        self, policy: Any, settings: TrainerSettings, replicas: ReplicaGroup | None = None
    ) -> None:
        self.settings = settings
        self.replicas = replicas or ReplicaGroup()
        set_precision(settings)
        self.trained = TrainedModel(policy, settings, self.replicas)
        self.reference: RankedModel | None = None
        """None with an adapter: the reference is then the policy without it."""
        self.critic: Critic | None = None
        """What predicts values, for an algorithm that needs it."""
        self._copies_beside = torch.device(settings.device).type == "cuda"

    @property
    def policy(self) -> Any:
        return self.trained.model

    @property
    def optimizer(self) -> PolicyOptimizer:
        return self.trained.optimizer

    def add_critic(self, algorithm: ActorCriticPPO) -> None:
        self.critic = Critic(self.policy, self.settings, algorithm, self.replicas)

    def hold_reference(self, policy: Any, weights: TensorReaders | None = None) -> None:
        """Keep a policy, of any architecture with the same tokens, as the reference."""
        self.reference = RankedModel(policy.requires_grad_(False), self.settings, self.replicas)
        if weights is not None:
            self.reference.load(weights)

    @torch.no_grad()
    def run_reference(
        self, function: Callable[..., Any], micro: MicroBatch, **keywords: Any
    ) -> Any:
        """Run a function as `RankedModel.run` does, on the reference."""
        if self.reference:
            return self.reference.run(function, micro, **keywords)
        with without_adapter(self.policy):
            return self.trained.run(function, micro, **keywords)

    @property
    def num_common_tokens(self) -> int | None:
        """Tokens of the vocabulary that policy and reference share; None: all."""
        if not self.reference:
            return None
        models = self.policy, self.reference.model
        sizes: list[int] = [model.config.get_text_config().vocab_size for model in models]
        return min(sizes)

    def reference_logprobs(self, micro: MicroBatch, temperature: float) -> Tensor:
        return self.run_reference(  # type: ignore[no-any-return]
            token_logprobs, micro, temperature=temperature
        )

    def stage(
        self,
        version: int,
        channel: WeightsWriter,
        *,
        dtype: torch.dtype,
        serves_adapter: bool = False,
    ) -> PolicyHashes:
        """Stage the weights, in the type that they are served in; return their hashes.

        They are converted on their device, and have left it when this returns. The leader alone
        hashes and writes them.

        Args:
            serves_adapter: stage a scaled adapter alone instead of merged weights.
        """
        pairs, hashes = self.served_tensors(dtype, serves_adapter=serves_adapter), NO_HASHES
        if self.replicas.is_leader:
            base, adapter = split_adapter(self.trained.tensors())
            like = _like(adapter if serves_adapter else base, dtype)
            hashes = _stage(pairs, like, version, channel)
        else:
            deque(pairs, maxlen=0)
        weights_hash, _, served_hash = self.replicas.broadcast_text(hashes).partition(" ")
        return PolicyHashes(weights_hash, served_hash)

    def served_tensors(
        self, dtype: torch.dtype, *, serves_adapter: bool = False
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield each weight by name, and as it is served: with its adapter, in another type.

        What is not served is yielded as it is. All ranks call this, since all have a part of each
        tensor.
        """
        tensors = self._gathered()
        base, adapter = split_adapter(tensors.like)
        if serves_adapter:
            served, convert = adapter, scale_adapter(self.policy)
        else:
            served, convert = base, merge_adapter(self.policy, tensors)
        for name in sorted(tensors):
            weights = tensors[name]
            is_served = name in served
            yield name, weights, convert(name, weights).to(dtype) if is_served else weights

    def free_memory(self) -> None:
        """Free gradients and the allocator's cache: the next step does not need them."""
        for each in self._trained_models():
            for parameter in each.optimizer.trainable:
                parameter.grad = None
        torch.cuda.empty_cache()  # nothing without CUDA

    def fingerprint(self) -> str:
        tensors, fingerprint = self._gathered(), NO_HASH
        if self.replicas.is_leader:
            fingerprint = hash_tensors(tensors)
        else:
            deque((tensors[name] for name in sorted(tensors)), maxlen=0)
        return self.replicas.broadcast_text(fingerprint)

    def weights(self) -> TensorReaders:
        """Return this process's rows of the weights, which the next update changes."""
        return own_rows(self.trained.tensors())

    def save(self) -> SavedState:
        """Return a copy of the rows that this process writes to a checkpoint."""
        saved, copied = self.begin_save()
        wait_for_copies(copied)
        return saved

    def begin_save(self) -> tuple[SavedState, Copies]:
        """Return what `save` does, and what ends when it has been copied.

        From a GPU it is copied beside the next step; the next update waits for the end.
        """
        optimizer = self.optimizer.named_state()
        if self.critic:
            optimizer |= self.critic.named_state()
        copied: list[Future[None]] = []
        if not self._copies_beside:
            return (copied_rows(self.trained.tensors()), copied_rows(optimizer)), copied
        copier = DeviceCopier(torch.device(self.settings.device))

        def begin_copy(source: Tensor, target: Tensor) -> None:
            copied.extend(copier.begin(source, target))

        weights = copied_rows(self.trained.tensors(), begin_copy)
        saved = weights, copied_rows(optimizer, begin_copy)
        copier.close()
        for each in self._trained_models():
            each.copies = copied
        return saved, copied

    def load_weights(self, weights: TensorReaders) -> None:
        """Load weights, and start the critic from their layers."""
        wait_for_copies(self.trained.copies)
        self.trained.load(weights)
        if self.critic:
            self.critic.load({})

    def load(self, weights: TensorReaders, optimizer: TensorReaders) -> None:
        """Continue from what `save` returned on all ranks, however many there were."""
        self.load_weights(weights)
        own = {n: optimizer[n] for n in optimizer if n != RNG_STATE and not n.startswith(PREFIX)}
        self.trained.load_optimizer(own)
        if self.critic:  # a fork from a run with a critic may leave it behind
            self.critic.load(optimizer)

    def _trained_models(self) -> list[TrainedModel]:
        return [self.trained, *([self.critic.trained] if self.critic else [])]

    def _gathered(self) -> StreamedTensors:
        tensors = self.trained.tensors()
        return StreamedTensors(_like(tensors), read=lambda name: full_tensor(tensors[name]))


def _stage(
    pairs: Iterator[tuple[str, Tensor, Tensor]],
    like: Mapping[str, Tensor],
    version: int,
    channel: WeightsWriter,
) -> str:
    """Stage what is served of each weight; return the hashes of all weights, and of these."""
    master = TensorHash()
    with hashing_threads() as threads:

        def read(name: str) -> Tensor:
            for key, weights, served in pairs:
                master.add_async(key, weights, threads=threads)
                if key == name:
                    return served
            raise KeyError(name)

        served_hash = channel.stage(version, StreamedTensors(like, read=read))
        for key, weights, _ in pairs:  # an adapter's tensors, which come last
            master.add_async(key, weights, threads=threads)
        master.finish()
    return f"{master.hexdigest()} {served_hash}"


def _like(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return {
        name: torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")
        for name, tensor in tensors.items()
    }


def numeric_environment(settings: RankSettings, replicas: ReplicaGroup) -> str:
    """Return, as JSON, what a replay must share to have the same bits."""
    trainer, device = settings.trainer, settings.trainer.device
    context = context_ranks(replicas, trainer)
    shards = trainer.parallel.shard_ranks
    on_cpu_in_bfloat16 = device == "cpu" and trainer.dtype == "bfloat16"
    environment = {
        "torch": torch.__version__,
        "ranks": settings.num_ranks,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
        "device": device,
        "device_name": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "dtype": trainer.dtype,
        "machine": os.uname().machine,
        **({"linear_layers": "onednn"} if onednn_is_faster() else {}),
        **({"head": "onednn"} if on_cpu_in_bfloat16 and multiplies_bfloat16() else {}),
        **({} if replicas.is_single_process else {"backend": "fsdp"}),
        **({"context_ranks": context} if context > 1 else {}),
        **({"shard_ranks": shards} if shards and not replicas.is_single_process else {}),
        **({"kernels": "deterministic"} if trainer.kernels == "deterministic" else {}),
    }
    return json.dumps(environment, sort_keys=True)
