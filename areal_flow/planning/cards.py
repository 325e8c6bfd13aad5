"""Whether trainer ranks and generators fit their cards, from what each needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from areal_flow.config import Recipe
from areal_flow.errors import ConfigError
from areal_flow.models.policy import DTYPES
from areal_flow.planning.memory import RankMemory

GIB = 2**30
CARDS = {
    "RTX4080-16GB": 15.6,
    "L4-24GB": 22.0,
    "RTX4090-24GB": 23.5,
    "A100-40GB": 39.4,
    "A100-80GB": 79.1,
    "H100-80GB": 79.1,
    "H200-141GB": 139.8,
}
"""GiB that torch finds on each."""
PRICES = dict(zip(CARDS, (0.3, 0.7, 0.5, 1.3, 1.8, 2.5, 3.5), strict=True))
"""Of an hour of each, in dollars: assumed, since every provider has its own."""
ENGINE_BYTES = 2 * GIB
"""What vLLM takes beside weights and cache: its context, graphs and the passes' activations."""


@dataclass(frozen=True, slots=True)
class GeneratorMemory:
    """A generator's on each of its cards."""

    weights_bytes: int
    cache_token_bytes: int
    """Of the keys and values of one token."""
    taken_bytes: int
    """All that it takes of the card, which the cache fills up."""
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
    card_bytes: int
    ranks: Sequence[RankMemory]
    generator: GeneratorMemory | None
    """None on a CPU."""
    shares_card: bool
    """Whether trainer and generator are on the same one."""

    @property
    def trainer_bytes(self) -> int:
        """What is left of a card for a trainer rank."""
        taken = self.generator.taken_bytes if self.generator and self.shares_card else 0
        return self.card_bytes - taken

    @property
    def fits(self) -> bool:
        trains = all(rank.needed_bytes <= self.trainer_bytes for rank in self.ranks)
        return trains and (self.generator is None or self.generator.fits)


def card_bytes(name: str) -> int:
    if name not in CARDS:
        raise ConfigError(f"--gpu {name}: expected one of {', '.join(CARDS)}")
    return int(CARDS[name] * GIB)


def plan_memory(
    recipe: Recipe, ranks: Sequence[RankMemory], policy: nn.Module, *, card: str
) -> MemoryPlan:
    """Return who takes what of a card.

    Args:
        policy: of the recipe's shapes; its tensors may be on the meta device.
    """
    devices = {torch.device(part.device).type for part in (recipe.trainer, recipe.generation)}
    cluster = recipe.cluster
    shares = devices == {"cuda"} and cluster.num_gpus == 1 and cluster.is_one_machine
    num_bytes = card_bytes(card)
    return MemoryPlan(num_bytes, ranks, _generator(recipe, policy, num_bytes), shares)


def _generator(recipe: Recipe, policy: Any, num_bytes: int) -> GeneratorMemory | None:
    settings, shape = recipe.generation, policy.config.get_text_config()
    if torch.device(settings.device).type != "cuda":
        return None
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
