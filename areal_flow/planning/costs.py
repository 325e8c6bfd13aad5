"""How long generators and a trainer take on a GPU: a roofline, with the shares that are reached.

A generator reads its weights and the keys and values of all its rows for each decode step. A
trainer computes every pass over every token, and gathers weights and scatters gradients meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal_flow.config import Recipe
from areal_flow.core.errors import ConfigError
from areal_flow.planning.gpu_memory import generator_memory
from areal_flow.planning.gpus import GIB, GPUS_PER_MACHINE, NETWORK_BYTES_PER_S, Gpu
from areal_flow.planning.lengths import Lengths
from areal_flow.policy.models.huggingface import on_meta_device
from areal_flow.policy.models.policy import policy_from_config
from areal_flow.training.flops import PolicyShape

PACKING_FILL = 0.95
"""Of `trainer.tokens_per_micro_batch`."""
PUBLISH_BYTES_PER_S, LOAD_BYTES_PER_S = 2.55e9, 3.02e9
"""Of weights as files of one process (docs/benchmarks.md, `weights`, 11M parameters)."""


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """What is reached of a GPU's rates, and what no rate explains.

    The defaults are the paper's (arXiv 2505.24298), but for `memory` and `reward_s`, which are
    assumed: `training` is 427.4 of 989 TFLOP/s (Figure 6a); both other times are what
    `benchmarks.paper --scale 4 --seeds 1` fits to two bars of Figure 5c.
    """

    memory: float = 0.6
    """Of the memory's bandwidth, in a decode step."""
    training: float = 0.43
    """Of the matrix rate, in training and in decode steps."""
    prefill: float = 0.43
    """Of the matrix rate, in prefills; assumed as in training."""
    decode_step_s: float = 6.4e-3
    """Of each decode step beside what is read and computed."""
    reward_s: float = 0.05
    """Of one completion on one reward worker."""
    trajectory_s: float = 8.6e-3
    """Of a training step for each of its trajectories: to collect, pack, send and check them."""
    publish_s: float = 0.0
    """Of each training step after its computation, beside the transfer of weights."""
    commit_s: float = 0.0
    """From the end of a group to its place in the buffer, beside the time that scoring takes."""


ASSUMED = Efficiencies()


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: of one generator, and of all trainer ranks together."""

    decode_step_s: float
    """Of a decode step, whatever it decodes."""
    row_s: float
    """Of each of its rows beside that."""
    cached_token_s: float
    """Of each token in the cache beside that."""
    prefill_token_s: float
    """Of each token of a prefix, which new weights have computed again."""
    max_rows: int
    """Decoded together: as many as are allowed, and as the cache holds."""
    train_token_s: float
    train_pair_s: float
    """Of each pair of tokens of a sequence: its length squared."""
    trajectory_s: float
    publish_s: float
    """From the end of a step to weights that can be loaded."""
    load_s: float
    """To read them, while decoding goes on."""
    reward_s: float = 0.0
    """Of one completion on all reward workers together."""
    commit_s: float = 0.0
    """Of a group, however many are committed meanwhile."""

    def decode_s(self, num_rows: float, num_cached: float) -> float:
        return self.decode_step_s + num_rows * self.row_s + num_cached * self.cached_token_s

    def tokens_per_s(self, num_rows: float, lengths: Lengths) -> float:
        """Return the speed of a generator with so many rows of any age."""
        return num_rows / self.decode_s(num_rows, num_rows * lengths.decoding_tokens)

    def train_s(self, lengths: Sequence[float]) -> float:
        """Return the time of a step on sequences of so many tokens, prompts included."""
        pairs = sum(length * length for length in lengths)
        each = self.trajectory_s * len(lengths)
        return each + self.train_token_s * sum(lengths) + self.train_pair_s * pairs

    def mean_train_s(self, batch_size: int, lengths: Lengths) -> float:
        tokens = self.train_token_s * (lengths.mean + lengths.prompt_tokens)
        pairs = self.train_pair_s * lengths.mean_of_squares
        return batch_size * (self.trajectory_s + tokens + pairs)


@dataclass(frozen=True)
class Policy:
    """A policy's shapes, without weights."""

    config: Any
    module: Any
    """On the meta device."""
    shape: PolicyShape

    @classmethod
    def of(cls, config: Any) -> Policy:
        with on_meta_device():
            module = policy_from_config(config, device="meta")
        shape = PolicyShape.of(module)
        if shape is None:
            raise ConfigError("model: expected a dense policy: that of experts cannot be planned")
        return cls(config, module, shape)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.module.parameters())


def costs_of(
    recipe: Recipe, policy: Policy, gpu: Gpu, lengths: Lengths, efficiency: Efficiencies
) -> Costs:
    """Return what the recipe's generators and trainers take, of which `cluster` says the number."""
    memory = generator_memory(recipe, policy.module, int(gpu.gib * GIB))
    parts = recipe.generation.vllm.tensor_parallel_size
    bandwidth, rate = gpu.memory_bytes_per_s * efficiency.memory, gpu.flops * efficiency.training
    shape = policy.shape
    token_flops = shape.token_flops
    pair_flops = 2.0 * shape.attention
    num_cached = memory.cache_tokens if recipe.generation.device == "cuda" else 1 << 40
    # A row that begins leaves room for those beside it to grow.
    fitting = int(num_cached / lengths.decoding_tokens)
    num_ranks = recipe.cluster.num_trainers
    again = recipe.trainer.activations == "recompute"
    models = shape.passes(recipe.algorithm)
    passes = sum(num_passes for _, num_passes in models) + again
    trained_flops = sum(num_passes * each.token_flops for each, num_passes in models)
    computing_s = (trained_flops + again * token_flops) / rate / num_ranks
    weights = 2.0 * policy.num_parameters
    return Costs(
        decode_step_s=efficiency.decode_step_s + memory.weights_bytes / bandwidth,
        row_s=token_flops / parts / rate,
        cached_token_s=memory.cache_token_bytes / bandwidth,
        prefill_token_s=(token_flops + pair_flops * lengths.decoding_tokens)
        / parts
        / (gpu.flops * efficiency.prefill),
        max_rows=max(1, min(recipe.generation.max_num_seqs, fitting)),
        train_token_s=max(computing_s, _communicating_s(recipe, weights, passes, gpu)),
        train_pair_s=passes * pair_flops / rate / num_ranks,
        trajectory_s=efficiency.trajectory_s,
        publish_s=efficiency.publish_s + weights / PUBLISH_BYTES_PER_S,
        load_s=weights / LOAD_BYTES_PER_S,
        reward_s=efficiency.reward_s / recipe.cluster.num_reward_workers,
        commit_s=efficiency.commit_s,
    )


def _communicating_s(recipe: Recipe, weights_bytes: float, passes: float, gpu: Gpu) -> float:
    """Return what ranks exchange for a token: each pass gathers the weights, the backward one too,
    and gradients in float32 are scattered; computing hides it where it takes longer."""
    num_ranks = recipe.cluster.num_trainers
    if num_ranks == 1:
        return 0.0
    within = num_ranks <= GPUS_PER_MACHINE
    link = gpu.link_bytes_per_s if within else min(gpu.link_bytes_per_s, NETWORK_BYTES_PER_S)
    exchanged = weights_bytes * (passes - 1 + 2) * (num_ranks - 1) / num_ranks
    rows = num_ranks / recipe.trainer.parallel.context_ranks
    return exchanged / link / (PACKING_FILL * recipe.trainer.tokens_per_micro_batch * rows)
