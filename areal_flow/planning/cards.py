"""What cards have and cost, and whether trainer ranks and generators fit them."""

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
NETWORK_BYTES_PER_S = 50e9
"""Of a GPU, between machines: 400 Gb/s, an eighth of the paper's 3.2 Tb/s a machine (arXiv
2505.24298, section 7.1)."""
GPUS_PER_MACHINE = 8


@dataclass(frozen=True, slots=True)
class Card:
    gib: float
    """What torch finds."""
    flops: float
    """Of dense bfloat16 matrices, a second."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To another card of the machine, in one direction."""
    price_per_hour: float
    """In US dollars: an assumption of this project, about what was asked for on demand in 2025;
    `--price` is your own."""


CARDS = {
    # NVIDIA's data sheets of each card: dense bfloat16 (half of the figure with sparsity), memory
    # bandwidth, and half of NVLink's figure for both directions; 4090 and L40S have PCIe 4.0 x16.
    "RTX4080-16GB": Card(15.6, 97.5e12, 0.717e12, 32e9, 0.3),
    "L4-24GB": Card(22.0, 121e12, 0.3e12, 32e9, 0.7),
    "RTX4090-24GB": Card(23.5, 165.2e12, 1.008e12, 32e9, 0.4),
    "L40S-48GB": Card(44.5, 362e12, 0.864e12, 32e9, 1.0),
    "A100-40GB": Card(39.4, 312e12, 1.555e12, 300e9, 1.3),
    "A100-80GB": Card(79.1, 312e12, 2.039e12, 300e9, 1.6),
    # An H100 with NVLink of 400 GB/s in both directions together (export rules of 2022).
    "H800-80GB": Card(79.1, 989e12, 3.35e12, 200e9, 2.5),
    "H100-80GB": Card(79.1, 989e12, 3.35e12, 450e9, 2.5),
    "H200-141GB": Card(139.8, 989e12, 4.8e12, 450e9, 3.5),
    # One core of the machine of docs/benchmarks.md: assumed, for `--calibrate` to correct.
    "CPU": Card(8.0, 100e9, 10e9, 10e9, 0.05),
}
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


def card_named(name: str) -> Card:
    """Return a card by its name, or by a part of it that no other one has."""
    found = [each for each in CARDS if each == name] or [each for each in CARDS if name in each]
    if not name or len(found) != 1:
        raise ConfigError(f"--gpu {name}: expected one of {', '.join(CARDS)}")
    return CARDS[found[0]]


def card_bytes(name: str) -> int:
    return int(card_named(name).gib * GIB)


def plan_memory(
    recipe: Recipe, ranks: Sequence[RankMemory], policy: nn.Module, *, card: str
) -> MemoryPlan:
    """Return who takes what of a card.

    Args:
        policy: of the recipe's shapes; its tensors may be on the meta device.
    """
    devices = {torch.device(part.device).type for part in (recipe.trainer, recipe.generation)}
    shares = devices == {"cuda"} and recipe.cluster.shares_gpu
    num_bytes = card_bytes(card)
    on_card = torch.device(recipe.generation.device).type == "cuda"
    generator = generator_memory(recipe, policy, num_bytes) if on_card else None
    return MemoryPlan(num_bytes, ranks, generator, shares)


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
