"""The cost model: lengths of completions, shapes of models, and seconds per token on a GPU.

A roofline, times the share of it that is reached.

For each decode step a generator reads its weights and the keys and values of all its rows. A
trainer computes every pass over every token, while it gathers weights and scatters gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_flow.config import Recipe
from areal_flow.core.errors import ConfigError
from areal_flow.planning.gpus import GIB, GPUS_PER_MACHINE, NETWORK_BYTES_PER_S, Gpu
from areal_flow.planning.memory import generator_memory
from areal_flow.policy.models.huggingface import AutoConfig
from areal_flow.policy.models.policy import policy_from_config
from areal_flow.policy.tokenizer.directory import refuse_gguf
from areal_flow.training.flops import PolicyShape

NUM_DRAWN = 1 << 14
SIGMA = 1.0
MEAN_OF_LONGEST = 0.3355
"""9,276 of 27,648 tokens: in the paper's two rows of 1.5B hours times throughput, over 250 steps of
8,192 trajectories, are 9,275 and 9,276 tokens (arXiv 2505.24298 v5, Table 1 and Figure 5c)."""
GROUP_SHARE = 0.64
"""The square of 0.8: a linear probe of the question predicts how long reasoning will be with a
correlation above 0.8 (arXiv 2506.08390), so at least this share of variance is the prompt's."""
PACKING_FILL = 0.95
"""How full micro-batches are, of `trainer.tokens_per_micro_batch`."""
PUBLISH_BYTES_PER_S, LOAD_BYTES_PER_S = 2.55e9, 3.02e9
"""For weights as files, in one process (docs/benchmarks.md, `weights`, 11M parameters)."""
_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
_SHAPES = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "Qwen2.5-3B": (2048, 11_008, 36, 16, 2, 151_936, True),
    "Qwen2.5-7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "Qwen2.5-14B": (5120, 13_824, 48, 40, 8, 152_064, False),
    "Qwen2.5-32B": (5120, 27_648, 64, 40, 8, 152_064, False),
    "DeepSeek-R1-Distill-Qwen-1.5B": (1536, 8960, 28, 12, 2, 151_936, False),
    "DeepSeek-R1-Distill-Qwen-7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "DeepSeek-R1-Distill-Qwen-14B": (5120, 13_824, 48, 40, 8, 152_064, False),
    "DeepSeek-R1-Distill-Qwen-32B": (5120, 27_648, 64, 40, 8, 152_064, False),
    "SmolLM2-135M": (576, 1536, 30, 9, 3, 49_152, True),
}
"""Well-known models: SmolLM2 is a Llama, all others are Qwen2. An instruction-tuned model has the
shape of its base model."""


@dataclass(frozen=True)
class Lengths:
    prompt_tokens: float
    """The mean."""
    completion_tokens: NDArray[np.int64]
    """`[draws]`: equally likely completions."""
    source: str
    group_share: float = 0.0
    """Share of the variance of normal scores that completions of one prompt have in common."""

    def of_group(self, seeds: Sequence[int]) -> list[int]:
        """Return the lengths of the completions of one prompt, by their seeds."""
        own, common = np.asarray(seeds) % NUM_DRAWN, sum(seeds) // NUM_DRAWN % NUM_DRAWN
        return [*map(int, self._of_scores(_normal_scores()[own], _normal_scores()[common]))]

    def _of_scores(self, own: NDArray[np.float64], common: Any) -> NDArray[np.int64]:
        scores = sqrt(self.group_share) * common + sqrt(1 - self.group_share) * own
        places = np.searchsorted(_normal_scores(), scores).clip(max=NUM_DRAWN - 1)
        lengths: NDArray[np.int64] = self._sorted[places * len(self._sorted) // NUM_DRAWN]
        return lengths

    @cached_property
    def _sorted(self) -> NDArray[np.int64]:
        return np.sort(self.completion_tokens)

    @cached_property
    def mean(self) -> float:
        return float(self.completion_tokens.mean())

    @cached_property
    def mean_of_squares(self) -> float:
        """The mean square of prompt and completion together."""
        return float(((self.completion_tokens + self.prompt_tokens) ** 2.0).mean())

    @cached_property
    def decoding_tokens(self) -> float:
        """The mean number of cached tokens over a row's decode steps."""
        squares = float((self.completion_tokens**2.0).mean())
        return self.prompt_tokens + squares / self.mean / 2

    def mean_longest_of(self, group_size: int) -> float:
        """Return the mean of the longest completion of a group."""
        scores = np.random.default_rng(0).standard_normal((1024, group_size + 1))
        return float(self._of_scores(scores[:, 1:], scores[:, :1]).max(axis=1).mean())

    def longest_of(self, number: int) -> float:
        """Return the likely length of the longest of some completions."""
        return float(np.quantile(self.completion_tokens, 1 - 0.5 / number))


def recorded_lengths(
    prompt_tokens: Sequence[int],
    completion_tokens: Sequence[int],
    *,
    source: str,
    groups: Sequence[int] = (),
) -> Lengths:
    """Return measured lengths; completions with equal `groups` share a prompt."""
    lengths = np.asarray(completion_tokens, np.int64)
    share = _group_share(lengths, groups) if len(groups) else 0.0
    return Lengths(float(np.mean(prompt_tokens)), lengths, source, share)


def _group_share(lengths: NDArray[np.int64], groups: Sequence[int]) -> float:
    """Return the share of variance between groups, less what equally many would have by chance."""
    logs = np.log(lengths + 1.0)
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    between = (np.bincount(group, logs - logs.mean()) ** 2 / sizes).sum() / len(logs)
    by_chance = len(sizes) / len(logs)
    if by_chance == 1 or not logs.var():
        return 0.0
    return float(np.clip((between / logs.var() - by_chance) / (1 - by_chance), 0.0, 1.0))


def assumed_lengths(
    longest: int,
    *,
    mean: float = 0.0,
    sigma: float = SIGMA,
    prompt_tokens: float = 128.0,
    group_share: float = GROUP_SHARE,
) -> Lengths:
    """Return lognormal lengths, truncated at `longest`.

    Args:
        longest: `generation.max_new_tokens`.
        mean: after truncation; by default a share of `longest`, as in the paper.
    """
    mean = mean or MEAN_OF_LONGEST * longest
    shape = np.exp(sigma * _normal_scores())
    low, high = 0.0, float(longest) * 10
    for _ in range(60):
        median = (low + high) / 2
        too_long = np.minimum(median * shape, longest).mean() > mean
        low, high = (low, median) if too_long else (median, high)
    drawn = np.clip(low * shape, 1, longest).round().astype(np.int64)
    source = f"assumed: lognormal, {mean:,.0f} tokens in the mean, cut at {longest:,}"
    return Lengths(prompt_tokens, drawn, source, group_share)


@cache
def _normal_scores() -> NDArray[np.float64]:
    """Return the sorted quantiles of the standard normal distribution."""
    draw = NormalDist().inv_cdf
    return np.array([draw((place + 0.5) / NUM_DRAWN) for place in range(NUM_DRAWN)])


def model_config(model: str) -> Any:
    """Return the configuration of a model directory, a `config.json` or a well-known model.

    Nothing is downloaded.
    """
    path = Path(model)
    directory = path.parent if path.name == "config.json" else path
    if (directory / "config.json").is_file():
        return AutoConfig.from_pretrained(str(directory), local_files_only=True)
    refuse_gguf(path)
    shape = _SHAPES.get(path.name.removesuffix("-Instruct"))
    if shape is None:
        raise ConfigError(
            f"model = {model!r}: expected a directory with config.json, or one of "
            f"{', '.join(_SHAPES)}, whose shapes are known; download the model's config.json and "
            "give its directory"
        )
    sizes = dict(zip(_FIELDS, shape, strict=True))
    kind, context = ("llama", 8192) if path.name.startswith("SmolLM2") else ("qwen2", 131_072)
    return AutoConfig.for_model(kind, max_position_embeddings=context, **sizes)


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """Achieved shares of a GPU's rates, and fixed overheads in seconds.

    The defaults are the paper's (arXiv 2505.24298), except `memory` and `reward_s`, which are
    assumed: `training` is 427.4 of 989 TFLOP/s (Figure 6a); `decode_step_s` and `token_s` are
    what `benchmarks.paper --scale 4 --seeds 1` fits to two bars of Figure 5c.
    """

    memory: float = 0.6
    """Share of the memory bandwidth, in a decode step."""
    training: float = 0.43
    """Share of the matrix rate, in training and in decode steps."""
    prefill: float = 0.43
    """Share of the matrix rate, in prefills; assumed as in training."""
    decode_step_s: float = 6.4e-3
    """Overhead of a decode step."""
    reward_s: float = 0.05
    """Scoring of one completion on one reward worker."""
    token_s: float = 29.2e-6
    """Overhead of a training step per token on its rank: ranks that wait for the slowest, padding,
    packing, and passes that have no part in `training`."""
    publish_s: float = 0.0
    """Overhead of a training step after its computation, without the transfer of weights."""
    commit_s: float = 0.0
    """From the end of a group to its place in the buffer, without scoring."""


ASSUMED = Efficiencies()


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one generator, and of all trainer ranks together."""

    decode_step_s: float
    """Fixed cost of a decode step."""
    row_s: float
    """Extra cost per row of a decode step."""
    cached_token_s: float
    """Extra cost per token in the cache."""
    prefill_token_s: float
    """Per token of a prefix that new weights recompute."""
    max_rows: int
    """Rows decoded together: as many as settings and cache allow."""
    train_token_s: float
    train_pair_s: float
    """Per pair of tokens of a sequence, of which there are length squared."""
    publish_s: float
    """From the end of a step to weights that can be loaded."""
    load_s: float
    """To read the weights, while decoding goes on."""
    reward_s: float = 0.0
    """Per completion, with all reward workers."""
    commit_s: float = 0.0
    """Per group, however many are committed at once."""

    def decode_s(self, num_rows: float, num_cached: float) -> float:
        return self.decode_step_s + num_rows * self.row_s + num_cached * self.cached_token_s

    def tokens_per_s(self, num_rows: float, lengths: Lengths) -> float:
        """Return a generator's speed with rows of all ages."""
        return num_rows / self.decode_s(num_rows, num_rows * lengths.decoding_tokens)

    def train_s(self, lengths: Sequence[float]) -> float:
        """Return the time of a step on sequences of these lengths, prompts included."""
        pairs = sum(length * length for length in lengths)
        return self.train_token_s * sum(lengths) + self.train_pair_s * pairs

    def mean_train_s(self, batch_size: int, lengths: Lengths) -> float:
        tokens = self.train_token_s * (lengths.mean + lengths.prompt_tokens)
        pairs = self.train_pair_s * lengths.mean_of_squares
        return batch_size * (tokens + pairs)


@dataclass(frozen=True)
class Policy:
    """The shapes of a policy, without weights."""

    config: Any
    module: Any
    """On the meta device."""
    shape: PolicyShape

    @classmethod
    def of(cls, config: Any) -> Policy:
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
    """Return the costs of a recipe with as many workers as its `cluster` section says."""
    memory = generator_memory(recipe, policy.module, int(gpu.gib * GIB))
    parts = recipe.generation.vllm.tensor_parallel_size
    bandwidth, rate = gpu.memory_bytes_per_s * efficiency.memory, gpu.flops * efficiency.training
    shape = policy.shape
    token_flops = shape.token_flops
    pair_flops = 2.0 * shape.attention
    num_cached = memory.cache_tokens if recipe.generation.device == "cuda" else 1 << 40
    rows_in_cache = int(num_cached / lengths.decoding_tokens)
    num_ranks = recipe.cluster.num_trainers
    recompute = recipe.trainer.activations == "recompute"
    models = shape.passes(recipe.algorithm)
    passes = sum(num_passes for _, num_passes in models) + recompute
    trained_flops = sum(num_passes * each.token_flops for each, num_passes in models)
    computing_s = (trained_flops + recompute * token_flops) / rate / num_ranks
    weights = 2.0 * policy.num_parameters
    return Costs(
        decode_step_s=efficiency.decode_step_s + memory.weights_bytes / bandwidth,
        row_s=token_flops / parts / rate,
        cached_token_s=memory.cache_token_bytes / bandwidth,
        prefill_token_s=(token_flops + pair_flops * lengths.decoding_tokens)
        / parts
        / (gpu.flops * efficiency.prefill),
        max_rows=max(1, min(recipe.generation.max_num_seqs, rows_in_cache)),
        train_token_s=efficiency.token_s / num_ranks
        + max(computing_s, _communicating_s(recipe, weights, passes, gpu)),
        train_pair_s=passes * pair_flops / rate / num_ranks,
        publish_s=efficiency.publish_s + weights / PUBLISH_BYTES_PER_S,
        load_s=weights / LOAD_BYTES_PER_S,
        reward_s=efficiency.reward_s / recipe.cluster.num_reward_workers,
        commit_s=efficiency.commit_s,
    )


def _communicating_s(recipe: Recipe, weights_bytes: float, passes: float, gpu: Gpu) -> float:
    """Return the time of FSDP's transfers per token; computation hides them where it takes longer.

    Each pass gathers the weights, the backward pass too, and scatters float32 gradients.
    """
    num_ranks = recipe.cluster.num_trainers
    if num_ranks == 1:
        return 0.0
    link = gpu.link_bytes_per_s
    if num_ranks > GPUS_PER_MACHINE:
        link = min(link, NETWORK_BYTES_PER_S)
    exchanged = weights_bytes * (passes - 1 + 2) * (num_ranks - 1) / num_ranks
    rows = num_ranks / recipe.trainer.parallel.context_ranks
    return exchanged / link / (PACKING_FILL * recipe.trainer.tokens_per_micro_batch * rows)
