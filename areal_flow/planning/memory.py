"""Peak GPU memory: trainer ranks by the trainer's own step, generators by formula.

A trainer rank is not estimated by formula: the policy, its passes, losses and optimizer are those
that train. The policy's tensors, and everything computed from them, are torch's fake tensors, which
have a shape and no content; what the host computes (batches, advantages, plans) is real. A number
that the host reads from a fake tensor is 1.

For `trainer.device = "cuda"` attention and head are those of a GPU, even where torch was built for
CPUs; linear layers and AdamW are the plain and the fused one, layers are not compiled, and the
allocator rounds to 512 bytes. The figures exclude the CUDA context, workspaces of libraries and
fragmentation, for which `RESERVED_BYTES` and `FRAGMENTATION` are left free.

With several ranks, torch's fake process group stands for the others, and only rank 0 is computed:
all ranks have the same rows, and none has a larger part of a tensor.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from areal_flow.config import Recipe
from areal_flow.core.errors import ConfigError, EngineError
from areal_flow.core.layout import RunLayout
from areal_flow.core.types import Rendezvous, VersionSpan
from areal_flow.planning.gpus import GIB, gpu_bytes
from areal_flow.policy.models import reward_model, segments
from areal_flow.policy.models.linear import OneDnnLinear
from areal_flow.policy.models.lora import add_adapter
from areal_flow.policy.models.policy import DTYPES, policy_from_config
from areal_flow.policy.settings import LoraSettings
from areal_flow.policy.weights.channel import HashingWriter
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.training import critic, head, kernels, ranked_model
from areal_flow.training.kernels import RESERVED_BYTES, compiles_layers
from areal_flow.training.rank import TrainerRank
from areal_flow.training.replicas import ConnectedRanks, ReplicaGroup
from areal_flow.training.sequences import TrainingSequence
from areal_flow.training.step import train_step

FRAGMENTATION = 0.05
"""Share of the peak that the caching allocator holds in blocks too small to be used."""

ENGINE_BYTES = 2 * GIB
"""What vLLM needs besides weights and cache: CUDA context, graphs and activations."""
_KINDS = {
    "Parameter": "parameters",
    "Buffer": "parameters",
    "Gradient": "gradients",
    "Optstate": "optimizer",
    "Activation": "activations",
    "Other": "activations",
    "Temp": "temporaries",
}
"""Our name for each kind of torch's tracker."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    rank: int
    peak_bytes: int
    by_kind: Mapping[str, int]
    """The peak by parameters, gradients, optimizer, activations and temporaries."""
    kept_bytes: int = 0
    """Kept between two steps."""

    @property
    def needed_bytes(self) -> int:
        """GPU memory that this rank needs."""
        return int(self.peak_bytes * (1 + FRAGMENTATION)) + RESERVED_BYTES


def trainer_memory(recipe: Recipe, config: Any, *, device_bytes: int = 0) -> list[RankMemory]:
    """Return each trainer rank's peak within a step on the recipe's longest rows.

    Args:
        config: the policy's `transformers` configuration.
        device_bytes: the memory of a GPU, from which chunks of the head follow.
    """
    if recipe.trainer.optimizer != "adamw":
        raise ConfigError(
            f"trainer.optimizer = {recipe.trainer.optimizer!r}: expected 'adamw', the only one "
            "whose memory can be planned; Muon has one moment of a matrix where AdamW has two"
        )
    on_cuda = torch.device(recipe.trainer.device).type == "cuda"
    gpu = _GpuKernels(device_bytes, compiles_layers(recipe.trainer)) if on_cuda else None
    num_ranks, lora = recipe.cluster.num_trainers, recipe.trainer.lora
    with torch.device("meta"):
        policy = policy_from_config(config, device="meta")
        if lora.rank:  # before the fake mode: `peft` moves tensors, which fake ones do not support
            add_adapter(policy, lora)
    on_cpu = recipe.trainer.model_copy(update={"device": "cpu", "lora": LoraSettings()})
    if on_cuda:
        _undo_onednn(policy)
    fake, device = FakeTensorMode(allow_non_fake_inputs=True), FakeDevice()  # type: ignore[no-untyped-call]
    # Likely tokens of all chunks are concatenated.
    all_chunks = recipe.algorithm.reference_top_k > 0
    with fake_ranks(num_ranks) as ranks, _as_on(gpu, all_chunks), fake, device:
        settings = recipe.model_copy(update={"trainer": on_cpu}).for_trainer()
        channel = HashingWriter()
        rank = TrainerRank(RunLayout(Path()), settings, channel=channel, read_rows=lambda _: [])
        rank.replicas = ranks
        rank.adopt(policy)
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


def _trained(rank: TrainerRank) -> list[tuple[nn.Module, Any]]:
    """Return policy and critic, if any, each with its optimizer."""
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
    """Return bytes by kind at a step's peak, and bytes kept until the next step.

    Args:
        rows: the length of each sequence of a micro-batch, in tokens.
    """
    backend = rank.backend
    algorithm = rank.config.algorithm.model_copy(update={"num_minibatches": 1})
    settings = replace(rank.settings, algorithm=algorithm)
    num_batches = backend.trained.num_batches
    # The first step allocates the optimizer's state and the buffers of gathered weights.
    train_step(backend, longest_sequences([8], num_batches), step=1, settings=settings)
    tracker = PassesTracker()
    tracker.track_external(*chain.from_iterable(_trained(rank)))
    with tracker, warnings.catch_warnings():
        # Of modules that no longer exist, and have nothing to count.
        warnings.filterwarnings("ignore", message="Module is None. Skipping")
        sequences = longest_sequences(rows, num_batches)
        train_step(backend, sequences, step=2, settings=settings)
        backend.free_memory()
        kept = tracker.get_tracker_snapshot("current").values()
    by_kind: Counter[str] = Counter(dict.fromkeys(_KINDS.values(), 0))
    for snapshot in tracker.get_tracker_snapshot("peak").values():
        for kind, name in _KINDS.items():
            by_kind[name] += snapshot.get(kind, 0)
    kept_bytes = sum(snapshot["Total"] for snapshot in kept)
    at_staging = kept_bytes + by_kind["gradients"] + staged_bytes(rank)
    by_kind["temporaries"] += max(0, at_staging - sum(by_kind.values()))
    return dict(by_kind), kept_bytes


def staged_bytes(rank: TrainerRank) -> int:
    """Return the memory of weights on their way to the generators: two at a time are on the GPU."""
    tensors, dtype = rank.backend.trained.tensors(), DTYPES[rank.config.served_dtype]
    largest = sorted(tensors.values(), key=Tensor.numel)[-2:]
    gathered = sum(4 * each.numel() for each in largest if isinstance(each, DTensor))
    converted = sum(each.numel() for each in largest) * dtype.itemsize
    return gathered + (converted if dtype != torch.float32 else 0)


def longest_rows(recipe: Recipe) -> list[int]:
    """Return the sequence lengths of a full micro-batch of the longest possible rows."""
    max_tokens = recipe.trainer.tokens_per_micro_batch
    longest = min(max_tokens, recipe.generation.max_model_len or max_tokens)
    rest = max_tokens % longest
    return [longest] * (max_tokens // longest) + ([rest] if rest > 1 else [])


def longest_sequences(lengths: Sequence[int], num_batches: int) -> list[TrainingSequence]:
    """Return two micro-batches per rank: the second one runs while gradients exist."""
    return [
        TrainingSequence(
            prompt_tokens=np.full(1, group, np.int32),  # not shared
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
    """On top of a `FakeTensorMode`: compute with real tensors alone for real, as the host does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # dispatched again for its local tensors
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if tensors and not any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if tensors[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


class _FakeRanks(ConnectedRanks):
    """This process is rank 0; the other ranks do not exist."""

    def gather(self, tensors: Mapping[int, Tensor]) -> list[Tensor]:
        (own,) = tensors.values()
        return [own] * self.num_ranks

    def mesh(self, num_consecutive: int) -> Any:
        with unset_fake_temporarily():
            return super().mesh(num_consecutive)


@dataclass(frozen=True, slots=True)
class _GpuKernels:
    device_bytes: int
    are_compiled: bool


@contextmanager
def _as_on(gpu: _GpuKernels | None, all_chunks: bool) -> Iterator[None]:
    """Choose a GPU's kernels of attention and head, although the fake device is torch's CPU.

    Offloaded tensors take no memory until they return. What is copied to the host is real.
    """
    chunks_of = head._chunks

    def few_chunks(*of: Any) -> list[Any]:
        return _first_and_last([*chunks_of(*of)])

    def critic_of(policy: nn.Module, **of: Any) -> Any:
        with unset_fake_temporarily():  # on the meta device, as the policy
            model = reward_model.critic_of(policy, **of)
        if gpu:
            _undo_onednn(model)
        return model

    replaced: list[tuple[Any, str, Any]] = [
        (segments, "has_fused_kernels", lambda device: gpu is not None),
        (ranked_model, "to_host", _zeros_like_on_host),
        (critic, "critic_of", critic_of),
        *(_replaced_on_gpu(gpu) if gpu else []),
        *([] if all_chunks else [(head, "_chunks", few_chunks)]),
    ]
    originals = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    try:
        for each in replaced:
            setattr(*each)
        yield
    finally:
        for each in originals:
            setattr(*each)


def _replaced_on_gpu(gpu: _GpuKernels) -> list[tuple[Any, str, Any]]:
    num_numbers = head.chunk_numbers_in(gpu.device_bytes)
    return [
        (kernels, "MainMemoryCopy", _OffloadedTensor),
        (head, "chunk_numbers", lambda device: num_numbers),
        (head, "has_compiled_kernels", lambda: gpu.are_compiled),
        (head, "_compiled", _outputs_of),
    ]


def _outputs_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that allocates what a compiled function returns, and nothing else."""

    def allocate(*arguments: Any) -> Any:
        with unset_fake_temporarily(), _disable_current_modes():
            outputs = function(*tree_map_only(Tensor, _on_meta, arguments))
        return tree_map_only(Tensor, partial(torch.empty_like, device="cpu"), outputs)

    return allocate


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _first_and_last(chunks: list[Any]) -> list[Any]:
    """Return the chunks of a head that matter: the middle ones need what the second one does."""
    return [*chunks[:2], *chunks[2:][-1:]]


def _zeros_like_on_host(values: Tensor) -> Tensor:
    with unset_fake_temporarily():
        return torch.zeros(values.shape, dtype=torch.float64)


class _OffloadedTensor:
    """Keeps only the metadata of a tensor."""

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
        """Install no gradient hooks on modules with frozen parameters, which refuse them."""
        have_gradients = all(each.requires_grad for each in module.parameters())
        return super()._track_module_params_and_buffers(
            module, install_grad_hooks and have_gradients
        )

    def _update_peak_stats(self, peak_state: Any) -> None:
        """Skip the peaks of each module, which take four fifths of the time."""
        modules, self.memory_tracking = self.memory_tracking, WeakIdKeyDictionary()
        super()._update_peak_stats(peak_state)
        self.memory_tracking = modules


@dataclass(frozen=True, slots=True)
class GeneratorMemory:
    """The memory of a generator on each of its GPUs."""

    weights_bytes: int
    cache_token_bytes: int
    """Keys and values of one token."""
    taken_bytes: int
    """Its total, which the cache fills up."""
    longest_tokens: int
    """The longest sequence, which the cache must hold."""

    @property
    def cache_tokens(self) -> int:
        left = self.taken_bytes - ENGINE_BYTES - self.weights_bytes
        return max(0, left // self.cache_token_bytes)

    @property
    def fits(self) -> bool:
        return self.cache_tokens >= self.longest_tokens


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    gpu_bytes: int
    ranks: Sequence[RankMemory]
    generator: GeneratorMemory | None
    """None on a CPU."""
    shares_gpu: bool
    """Whether trainer and generator are on the same GPU."""
    takes_turns: bool = False
    """Whether each frees its memory while the other works, except what it keeps."""

    @property
    def trainer_bytes(self) -> int:
        """GPU memory available to a trainer rank."""
        if not self.generator or not self.shares_gpu:
            return self.gpu_bytes
        return self.gpu_bytes - (ENGINE_BYTES if self.takes_turns else self.generator.taken_bytes)

    @property
    def generator_bytes(self) -> int:
        """GPU memory available to a generator, next to what an idle trainer keeps."""
        kept = max(rank.kept_bytes for rank in self.ranks) + RESERVED_BYTES
        return self.gpu_bytes - (kept if self.takes_turns else 0)

    @property
    def fits(self) -> bool:
        if any(rank.needed_bytes > self.trainer_bytes for rank in self.ranks):
            return False
        if self.generator is None:
            return True
        return self.generator.fits and self.generator.taken_bytes <= self.generator_bytes


def fitting_share(recomputed: MemoryPlan, kept: MemoryPlan) -> float:
    """Return the smallest share of recomputed layers, in quarters, for which the GPU has room.

    Args:
        recomputed: the plan with all layers recomputed, which fits.
        kept: the plan with none.
    """
    least, most = (max(rank.needed_bytes for rank in plan.ranks) for plan in (recomputed, kept))
    missing = max(0, most - recomputed.trainer_bytes)
    return ceil(4 * missing / (most - least)) / 4 if missing else 0.0


def plan_memory(
    recipe: Recipe, ranks: Sequence[RankMemory], policy: nn.Module, *, gpu: str
) -> MemoryPlan:
    """Return how trainer ranks and generators use a GPU.

    Args:
        policy: a policy of the recipe's shapes, possibly on the meta device.
    """
    num_bytes = gpu_bytes(gpu)
    on_gpu = torch.device(recipe.generation.device).type == "cuda"
    generator = generator_memory(recipe, policy, num_bytes) if on_gpu else None
    return MemoryPlan(num_bytes, ranks, generator, recipe.shares_gpu, recipe.takes_turns)


def planned_cache(recipe: Recipe, policy: Any, num_bytes: int) -> GenerationSettings:
    """Return vLLM's settings with a cache of fixed size, for a GPU shared with a trainer.

    vLLM would measure free memory: it would count what the trainer allocates meanwhile as its own,
    and fail where the trainer frees memory.

    Args:
        policy: a policy of the recipe's shapes, possibly on the meta device.
        num_bytes: memory of the GPU.

    Raises:
        EngineError: the longest sequence does not fit.
    """
    settings, memory = recipe.generation, generator_memory(recipe, policy, num_bytes)
    if not memory.fits:
        raise EngineError(
            f"generation.vllm.gpu_memory_utilization ({settings.vllm.gpu_memory_utilization}) "
            f"leaves room for {memory.cache_tokens:,} tokens beside the weights, and one sequence "
            f"may have {memory.longest_tokens:,}: raise it, or lower generation.max_model_len"
        )
    return settings.model_copy(update={"kv_cache_tokens": memory.cache_tokens})


def generator_memory(recipe: Recipe, policy: Any, num_bytes: int) -> GeneratorMemory:
    settings, shape = recipe.generation, policy.config.get_text_config()
    size, parts = DTYPES[settings.dtype].itemsize, settings.vllm.tensor_parallel_size
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    num_weights = sum(prod(tensor.shape) for tensor in policy.parameters())
    weight_size = 1 if settings.vllm.quantization == "fp8" else size
    return GeneratorMemory(
        weights_bytes=weight_size * num_weights // parts,
        cache_token_bytes=2
        * size
        * shape.num_hidden_layers
        * shape.num_key_value_heads
        * head_dim
        // parts,
        taken_bytes=int(settings.vllm.gpu_memory_utilization * num_bytes),
        longest_tokens=settings.max_model_len or recipe.trainer.tokens_per_micro_batch,
    )
