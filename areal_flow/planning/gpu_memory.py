"""Whether trainer ranks and generators fit their GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from areal_flow.config import Recipe
from areal_flow.core.errors import EngineError
from areal_flow.planning.gpus import GIB, gpu_bytes
from areal_flow.planning.memory import RankMemory
from areal_flow.policy.models.policy import DTYPES
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.training.kernels import RESERVED_BYTES

ENGINE_BYTES = 2 * GIB
"""What vLLM takes beside weights and cache: its context, graphs and the passes' activations."""


@dataclass(frozen=True, slots=True)
class GeneratorMemory:
    """A generator's on each of its GPUs."""

    weights_bytes: int
    cache_token_bytes: int
    """Of the keys and values of one token."""
    taken_bytes: int
    """All that it takes of the GPU, which the cache fills up."""
    longest_tokens: int
    """Of a sequence, which the cache must hold."""

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
    """Whether trainer and generator are on the same one."""
    takes_turns: bool = False
    """Whether each of the two leaves it while the other works, but for what it keeps."""

    @property
    def trainer_bytes(self) -> int:
        """What is left of a GPU for a trainer rank."""
        if not self.generator or not self.shares_gpu:
            return self.gpu_bytes
        return self.gpu_bytes - (ENGINE_BYTES if self.takes_turns else self.generator.taken_bytes)

    @property
    def generator_bytes(self) -> int:
        """What is left of a GPU for a generator, beside what a trainer at rest keeps."""
        kept = max(rank.kept_bytes for rank in self.ranks) + RESERVED_BYTES
        return self.gpu_bytes - (kept if self.takes_turns else 0)

    @property
    def fits(self) -> bool:
        if any(rank.needed_bytes > self.trainer_bytes for rank in self.ranks):
            return False
        if self.generator is None:
            return True
        return self.generator.fits and self.generator.taken_bytes <= self.generator_bytes


def plan_memory(
    recipe: Recipe, ranks: Sequence[RankMemory], policy: nn.Module, *, gpu: str
) -> MemoryPlan:
    """Return who takes what of a GPU.

    Args:
        policy: of the recipe's shapes; its tensors may be on the meta device.
    """
    num_bytes = gpu_bytes(gpu)
    on_gpu = torch.device(recipe.generation.device).type == "cuda"
    generator = generator_memory(recipe, policy, num_bytes) if on_gpu else None
    return MemoryPlan(num_bytes, ranks, generator, recipe.shares_gpu, recipe.takes_turns)


def planned_cache(recipe: Recipe, policy: Any, num_bytes: int) -> GenerationSettings:
    """Return the settings of vLLM with a cache of a fixed size, for a GPU that it shares.

    vLLM would measure what the GPU has left: it counts what a trainer allocates meanwhile as its
    own, and fails where the trainer frees memory.

    Args:
        policy: of the recipe's shapes; its tensors may be on the meta device.
        num_bytes: of the GPU's memory.

    Raises:
        EngineError: a sequence of the longest length has no room.
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
