"""Peak memory of trainer ranks, from the trainer's own step on tensors without content.

Nothing is estimated by formula: the policy, its passes, losses and optimizer are those that train.
Tensors of the policy, and all that is computed from them, are torch's fake ones, which have a shape
and no content; what the host computes (batches, advantages, plans) is real. A number that the
host reads of a fake tensor is 1.

For `trainer.device = "cuda"` attention and head are those of a GPU, although torch's build may be
the CPU's; linear layers and AdamW are the plain and the fused one, layers are not compiled, and the
allocator rounds to 512 bytes. Not in the figures: CUDA's
context, libraries' workspaces and fragmentation, for which `RESERVED_BYTES` and `FRAGMENTATION` are
left free.

Of several ranks, torch's fake process group stands for the others, and rank 0 alone is computed:
each rank has as many rows and equally long ones, and none has more of a tensor.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from areal_flow.config import Recipe
from areal_flow.core.errors import ConfigError
from areal_flow.core.layout import RunLayout
from areal_flow.core.types import Rendezvous, VersionSpan
from areal_flow.policy.models import reward_model, segments
from areal_flow.policy.models.linear import OneDnnLinear
from areal_flow.policy.models.lora import add_adapter
from areal_flow.policy.models.policy import policy_from_config
from areal_flow.policy.models.settings import LoraSettings
from areal_flow.policy.weights.channel import HashingWriter
from areal_flow.training import activations, critic, linear_logprobs, passes
from areal_flow.training.kernels import RESERVED_BYTES
from areal_flow.training.rank import TrainerRank
from areal_flow.training.replicas import ConnectedRanks, ReplicaGroup
from areal_flow.training.sequences import TrainingSequence
from areal_flow.training.step import train_step

FRAGMENTATION = 0.05
"""Of the peak: what the caching allocator holds in parts too small to be used."""

_KINDS = {
    "Parameter": "parameters",
    "Buffer": "parameters",
    "Gradient": "gradients",
    "Optstate": "optimizer",
    "Activation": "activations",
    "Other": "activations",
    "Temp": "temporaries",
}
"""What torch's tracker calls each kind, and what it is called here."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    rank: int
    peak_bytes: int
    by_kind: Mapping[str, int]
    """Of the peak: parameters, gradients, optimizer, activations, temporaries."""
    kept_bytes: int = 0
    """Between two steps, once it has given back what it does not begin the next one with."""

    @property
    def needed_bytes(self) -> int:
        """What of a GPU this rank takes."""
        return int(self.peak_bytes * (1 + FRAGMENTATION)) + RESERVED_BYTES


def trainer_memory(recipe: Recipe, config: Any) -> list[RankMemory]:
    """Return each trainer rank's peak within a step of the recipe's longest rows.

    Args:
        config: the policy's configuration, as `transformers` has it.
    """
    if recipe.trainer.optimizer != "adamw":
        raise ConfigError(
            f"trainer.optimizer = {recipe.trainer.optimizer!r}: expected 'adamw', the only one "
            "whose memory can be planned; Muon has one moment of a matrix where AdamW has two"
        )
    on_cuda = torch.device(recipe.trainer.device).type == "cuda"
    num_ranks, lora = recipe.cluster.num_trainers, recipe.trainer.lora
    with torch.device("meta"):
        policy = policy_from_config(config, device="meta")
        if lora.rank:  # here: `peft` moves its tensors, which fake ones cannot
            add_adapter(policy, lora)
    on_cpu = recipe.trainer.model_copy(update={"device": "cpu", "lora": LoraSettings()})
    if on_cuda:
        _undo_onednn(policy)
    fake, device = FakeTensorMode(allow_non_fake_inputs=True), FakeDevice()  # type: ignore[no-untyped-call]
    # What each chunk returns of likely tokens is put together.
    all_chunks = recipe.algorithm.reference_top_k > 0
    with fake_ranks(num_ranks) as ranks, _as_on(on_cuda, all_chunks), fake, device:
        rank = _adopt(recipe.model_copy(update={"trainer": on_cpu}), policy, ranks)
        if recipe.algorithm.needs_reference and not lora.rank:
            with unset_fake_temporarily(), torch.device("meta"):
                reference = policy_from_config(config, device="meta")
            rank.backend.hold_reference(reference)
        for _, optimizer in _trained(rank):
            for group in optimizer.param_groups if on_cuda else ():
                group["fused"] = True
        by_kind, kept_bytes = memory_of_step(rank, longest_rows(recipe))
    peak_bytes = sum(by_kind.values())
    return [RankMemory(each, peak_bytes, by_kind, kept_bytes) for each in range(num_ranks)]


def _adopt(recipe: Recipe, policy: nn.Module, ranks: ReplicaGroup) -> TrainerRank:
    rank = TrainerRank(
        RunLayout(Path()), recipe.for_trainer(), channel=HashingWriter(), read_rows=lambda _: []
    )
    rank.replicas = ranks
    rank.adopt(policy)
    return rank


def _trained(rank: TrainerRank) -> list[tuple[nn.Module, Any]]:
    """Return the policy and the critic, if there is one, each with its optimizer."""
    backend: Any = rank.backend
    parts = [(backend.policy, backend.optimizer)]
    if critic := backend.critic:
        parts.append((critic.model, critic.trained.optimizer))
    return parts


def _undo_onednn(policy: nn.Module) -> None:
    layers: list[Any] = [each for each in policy.modules() if isinstance(each, OneDnnLinear)]
    for layer in layers:
        layer.__class__ = nn.Linear


def memory_of_step(rank: TrainerRank, rows: Sequence[int]) -> tuple[dict[str, int], int]:
    """Return bytes by kind at a step's peak, and those that are kept until the next step.

    Args:
        rows: tokens of each sequence of a micro-batch.
    """
    backend = rank.backend
    algorithm = rank.config.algorithm.model_copy(update={"num_minibatches": 1})
    settings = replace(rank.settings, algorithm=algorithm)
    num_batches = backend.passes.num_batches
    # The first step makes the optimizer's state and the places of gathered weights, which are
    # there at every later peak.
    train_step(backend, longest_sequences([8], num_batches), step=1, settings=settings)
    tracker = PassesTracker()
    tracker.track_external(*chain.from_iterable(_trained(rank)))
    with tracker, warnings.catch_warnings():
        # It says so of modules that are gone by then, which have nothing to be counted.
        warnings.filterwarnings("ignore", message="Module is None. Skipping")
        sequences = longest_sequences(rows, num_batches)
        train_step(backend, sequences, step=2, settings=settings)
        backend.free_memory()
        kept = tracker.get_tracker_snapshot("current").values()
    by_kind: Counter[str] = Counter(dict.fromkeys(_KINDS.values(), 0))
    for snapshot in tracker.get_tracker_snapshot("peak").values():
        for kind, name in _KINDS.items():
            by_kind[name] += snapshot.get(kind, 0)
    return dict(by_kind), sum(snapshot["Total"] for snapshot in kept)


def longest_rows(recipe: Recipe) -> list[int]:
    """Return the tokens of each sequence of a full micro-batch of the longest ones there can be."""
    max_tokens = recipe.trainer.tokens_per_micro_batch
    longest = min(max_tokens, recipe.generation.max_model_len or max_tokens)
    rest = max_tokens % longest
    return [longest] * (max_tokens // longest) + ([rest] if rest > 1 else [])


def longest_sequences(lengths: Sequence[int], num_batches: int) -> list[TrainingSequence]:
    """Return two micro-batches a rank: at the second one there are gradients, too."""
    return [
        TrainingSequence(
            prompt_tokens=np.full(1, group, np.int32),  # no two share it
            output_tokens=np.zeros(length - 1, np.int32),
            behavior_logprobs=np.full(length - 1, -1.0, np.float32),
            trained=np.ones(length - 1, np.bool_),
            reward=float(group % 2),
            group=group,
            version_spans=(VersionSpan(0, length - 1),),
        )
        for group, length in enumerate([*lengths] * (2 * num_batches))
    ]


class FakeDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Over a `FakeTensorMode`: what is computed of real tensors alone is real, as on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come here again
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if tensors and not any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if tensors[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


class _FakeRanks(ConnectedRanks):
    """Of which this process is rank 0, and the others are nobody."""

    def gather(self, tensors: Mapping[int, Tensor]) -> list[Tensor]:
        (own,) = tensors.values()
        return [own] * self.num_ranks

    def mesh(self, num_consecutive: int) -> Any:
        with unset_fake_temporarily():
            return super().mesh(num_consecutive)


@contextmanager
def _as_on(on_cuda: bool, all_chunks: bool) -> Iterator[None]:
    """Choose the kernels of attention and head that a GPU has; the fake device is torch's CPU.

    What a GPU offloads is not there until it comes back. What comes to the host is real.
    """

    chunks_of = linear_logprobs._chunks

    def few_chunks(*of: Any) -> list[Any]:
        return _first_and_last([*chunks_of(*of)])

    def critic_of(policy: nn.Module, **of: Any) -> Any:
        with unset_fake_temporarily():  # as the policy, whose tensors are on the meta device
            model = reward_model.critic_of(policy, **of)
        if on_cuda:
            _undo_onednn(model)
        return model

    replaced: list[tuple[Any, str, Any]] = [
        (segments, "has_fused_kernels", lambda device: on_cuda),
        (passes, "to_host", _zeros_like_on_host),
        (critic, "critic_of", critic_of),
        *([(activations, "MainMemoryCopy", _Elsewhere)] if on_cuda else []),
        *([] if all_chunks else [(linear_logprobs, "_chunks", few_chunks)]),
    ]
    own = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    try:
        for each in replaced:
            setattr(*each)
        yield
    finally:
        for each in own:
            setattr(*each)


def _first_and_last(chunks: list[Any]) -> list[Any]:
    """Of a head: those between take what the second one does, and leave nothing behind."""
    return [*chunks[:2], *chunks[2:][-1:]]


def _zeros_like_on_host(values: Tensor) -> Tensor:
    with unset_fake_temporarily():
        return torch.zeros(values.shape, dtype=torch.float64)


class _Elsewhere:
    """Keeps of a tensor what it takes to make another without content."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._stride, self._dtype = tensor.shape, tensor.stride(), tensor.dtype

    def restored(self) -> Tensor:
        return torch.empty_strided(self._shape, self._stride, dtype=self._dtype)


@contextmanager
def fake_ranks(num_ranks: int) -> Iterator[ReplicaGroup]:
    if num_ranks == 1:
        yield ReplicaGroup()
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield _FakeRanks(Rendezvous("fake", 0, num_ranks), device_type="cpu")
    finally:
        distributed.destroy_process_group()


class PassesTracker(MemTracker):  # type: ignore[no-untyped-call]
    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        if not self._mod_tracker.is_bw:
            self.memory_tracking.pop(module, None)  # type: ignore[no-untyped-call]
        super()._pre_fw_hook(module, inputs)

    def _track_module_params_and_buffers(
        self, module: nn.Module, install_grad_hooks: bool = True
    ) -> tuple[int, int]:
        """Leave out hooks of gradients where a parameter is frozen: it takes none."""
        have_gradients = all(each.requires_grad for each in module.parameters())
        return super()._track_module_params_and_buffers(
            module, install_grad_hooks and have_gradients
        )

    def _update_peak_stats(self, peak_state: Any) -> None:
        """Leave out each module's own peaks, which take four fifths of the time."""
        modules, self.memory_tracking = self.memory_tracking, WeakIdKeyDictionary()
        super()._update_peak_stats(peak_state)
        self.memory_tracking = modules
