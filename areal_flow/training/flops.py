"""How much of its device's arithmetic a step uses: model FLOP utilisation.

(Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B). Counted is what the formula asks for, and
not what is computed twice to save memory.

Letters: N numbers in the matrices of the layers, T tokens of a row, L tokens of a sequence, M
trained ones of it, H hidden size, V vocabulary, A width of attention over all layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch import nn

from areal_flow.algorithms.composed import ComposedAlgorithm
from areal_flow.policy.models.linear import linear
from areal_flow.policy.models.policy import DTYPES
from areal_flow.training.sequences import MinibatchPlan, TrainingSequence, row_tokens

WIDTHS = {"cpu": 768, "cuda": 8192}
"""Of the square matrices that are multiplied to measure a rate."""
TRIALS = 5
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 4080": 97.5e12,
}
"""Operations a second on dense bfloat16 matrices by NVIDIA's data sheets. A device is the first one
whose words are all in its name."""


@dataclass(frozen=True, slots=True)
class PolicyShape:
    num_weights: int
    """N."""
    hidden: int
    """H."""
    head: int
    """H V; of a critic, H."""
    attention: int
    """A."""
    trains_weights: bool
    """False where an adapter is trained: the gradients of all other matrices are not computed."""

    @classmethod
    def of(cls, policy: Any) -> PolicyShape | None:
        """Return None for a policy with experts, whose tokens choose their matrices."""
        modules = [m for m in policy.get_decoder().modules() if not isinstance(m, nn.Embedding)]
        parameters = [p for module in modules for p in module.parameters(recurse=False)]
        if any(parameter.ndim > 2 for parameter in parameters):
            return None
        config = policy.config
        head_dim = getattr(config, "head_dim", None)
        heads = config.num_attention_heads
        width = heads * head_dim if head_dim else config.hidden_size
        matrices = [parameter for parameter in parameters if parameter.ndim == 2]
        return cls(
            num_weights=sum(matrix.numel() for matrix in matrices),
            hidden=config.hidden_size,
            head=config.hidden_size * config.vocab_size,
            attention=width * config.num_hidden_layers,
            trains_weights=all(matrix.requires_grad for matrix in matrices),
        )

    def forward_flops(self, rows: Sequence[Sequence[TrainingSequence]]) -> float:
        """Return the operations of a pass over rows: the sum of 2 N T + 2 A L^2 + 2 H V M.

        A prompt that sequences of a row share counts once, its own attention too, as one pass over
        it would do for all, whether or not the device repeats it.
        """
        num_tokens, num_pairs = sum(map(row_tokens, rows)), sum(map(_row_pairs, rows))
        num_trained = sum(s.num_trained for s in chain.from_iterable(rows))
        numbers = self.num_weights * num_tokens + self.attention * num_pairs
        return 2.0 * (numbers + self.head * num_trained)

    @property
    def token_flops(self) -> float:
        """Operations of a pass for a trained token, without attention."""
        return 2.0 * (self.num_weights + self.head)

    def passes(
        self, algorithm: ComposedAlgorithm, reference: PolicyShape | None = None
    ) -> list[tuple[PolicyShape, float]]:
        """Return the models of a step, each with how many forward passes its passes are worth.

        A backward pass is worth two, that of an adapter one.

        Args:
            reference: of another shape than the policy, such as a teacher.
        """
        own = 3.0 if self.trains_weights else 2.0
        if algorithm.needs_proximal:
            own += 1 - 1 / algorithm.num_minibatches
        own += algorithm.needs_minibatch_bound
        own += algorithm.needs_kl and algorithm.needs_proximal
        of_reference = float(algorithm.needs_reference + algorithm.bound_needs_kl)
        of_critic = 4.0 * algorithm.needs_critic  # its values, and its update
        critic = replace(self, head=self.hidden)
        return [(self, own), (reference or self, of_reference), (critic, of_critic)]

    def step_flops(
        self,
        sequences: Sequence[TrainingSequence],
        plan: Sequence[MinibatchPlan],
        algorithm: ComposedAlgorithm,
        reference: PolicyShape | None = None,
    ) -> float:
        """Return the operations of a step; see `passes`."""
        micro_batches = chain.from_iterable(chain.from_iterable(plan))
        rows = [[sequences[index] for index in micro] for micro in micro_batches]
        passes = self.passes(algorithm, reference)
        return sum(num_passes * shape.forward_flops(rows) for shape, num_passes in passes)


def _row_pairs(row: Sequence[TrainingSequence]) -> int:
    prompts = {s.prompt_tokens.tobytes(): len(s.prompt_tokens) for s in row}
    after_prompts = sum(s.num_tokens**2 - len(s.prompt_tokens) ** 2 for s in row)
    return sum(length**2 for length in prompts.values()) + after_prompts


def peak_rate(device_name: str, dtype: str) -> float | None:
    """Return a data sheet's operations a second; None for an unknown device."""
    words = set(re.split(r"[ -]", device_name))
    sheets = (rate for name, rate in PEAK_FLOPS.items() if words.issuperset(name.split()))
    return next(sheets, None) if dtype == "bfloat16" else None


def device_peak_rate(device: str, dtype: str) -> float | None:
    on_gpu = device.startswith("cuda")
    return peak_rate(torch.cuda.get_device_name(device), dtype) if on_gpu else None


def matrix_rate(device: str, dtype: str) -> float:
    """Return the measured operations a second on large random matrices.

    A GPU multiplies matrices of ones up to 15% faster: with fewer bits that change it draws less
    power, and its clock stays higher.
    """
    return _measured_rate(device, dtype, torch.get_num_threads())


@lru_cache
@torch.no_grad()
def _measured_rate(device: str, dtype: str, num_threads: int) -> float:
    """Return the operations a second of the best trial, since the machine may be shared."""
    on_gpu = device.startswith("cuda")
    width = WIDTHS["cuda" if on_gpu else "cpu"]
    generator = torch.Generator(device).manual_seed(0)  # the global one's draws are others'
    matrix = torch.randn(width, width, generator=generator, device=device).to(DTYPES[dtype])
    multiply = linear if not on_gpu and dtype == "float32" else torch.matmul
    seconds = []
    for _ in range(TRIALS):
        began = perf_counter()
        multiply(matrix, matrix)
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(perf_counter() - began)
    return 2.0 * width**3 / min(seconds)
