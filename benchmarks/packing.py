"""Dynamic packing against micro-batches of a fixed count, on lengths as the paper's.

Both ways compute the gradient of the same trajectories, and no micro-batch may hold more tokens
than the budget, which stands for memory. Dynamic packs by lengths (arXiv 2505.24298, Algorithm 1).
Fixed takes as many trajectories a micro-batch, in the order in which they came: the largest
number of which no micro-batch of this batch exceeds the budget. The ways take turns; the best
round counts.

Then how long planning takes, how full micro-batches are, and how many there are at least.

    python -m benchmarks.packing [--sequences 256] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from areal_flow.algorithms.clipped import DecoupledPPO
from areal_flow.algorithms.packing import pack_first_fit_decreasing
from areal_flow.algorithms.protocol import MinibatchSize
from areal_flow.config import TrainerSettings
from areal_flow.models.policy import policy_from_config
from areal_flow.trainer.replicated import ReplicatedBackend
from areal_flow.trainer.sequences import MicroBatches, TrainingSequence
from areal_flow.trainer.updates import Minibatch, StepSettings
from areal_flow.types import VersionSpan
from benchmarks.tailed_load import MODELS, Lengths

PROMPT_TOKENS = 32
PROFILES = {
    "moderate": (Lengths(median=120, sigma=0.6, cut=2048), 2560),
    "tails": (Lengths(median=120, sigma=1.0, cut=2048), 2560),
    "heavy tails": (Lengths(median=66, sigma=1.5, cut=2048), 2560),
}
"""Lengths of completions, and the budget of a micro-batch in tokens."""
PLANNED = {
    "the paper's": (Lengths(median=5_500, sigma=1.0, cut=27_648), 32_768),
    "97% of 200, 3% of 16,384": (None, 32_768),
}
NUM_PLANNED = 8192


@dataclass(frozen=True)
class Comparison:
    """Trained tokens a second by way, and micro-batches of each."""

    profile: str
    dynamic: float
    fixed: float
    dynamic_micro_batches: int
    fixed_micro_batches: int


def sequence(num_sampled: int, drawn: np.random.Generator, vocabulary: int) -> TrainingSequence:
    tokens = drawn.integers(0, vocabulary, PROMPT_TOKENS + num_sampled).astype(np.int32)
    return TrainingSequence(
        prompt_tokens=tokens[:PROMPT_TOKENS],
        output_tokens=tokens[PROMPT_TOKENS:],
        behavior_logprobs=np.full(num_sampled, -np.log(vocabulary), np.float32),
        trained=np.ones(num_sampled, np.bool_),
        reward=1.0,
        group=0,
        version_spans=(VersionSpan(0, num_sampled),),
        advantage=1.0,
    )


def fixed_count(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return micro-batches of the largest number of sequences with which none is too large."""
    for count in range(len(lengths), 0, -1):
        packed = [[*range(i, min(i + count, len(lengths)))] for i in range(0, len(lengths), count)]
        if all(sum(lengths[i] for i in micro) <= max_tokens for micro in packed):
            return packed
    raise ValueError(f"a sequence is longer than {max_tokens} tokens")


def compare(profile: str, num_sequences: int, rounds: int) -> Comparison:
    lengths_of, max_tokens = PROFILES[profile]
    drawn = np.random.default_rng(0)
    config = MODELS["0.6M"]
    sequences = [
        sequence(length, drawn, config.vocab_size)
        for length in lengths_of.draw(drawn, num_sequences)
    ]
    lengths = [s.num_tokens for s in sequences]
    plans = {
        "dynamic": pack_first_fit_decreasing(lengths, max_tokens=max_tokens),
        "fixed": fixed_count(lengths, max_tokens),
    }
    torch.manual_seed(0)
    backend = ReplicatedBackend(policy_from_config(config), TrainerSettings(learning_rate=1e-9))
    settings = StepSettings(DecoupledPPO(), temperature=1.0, seed=0)
    size = MinibatchSize(sum(s.num_trained for s in sequences), num_sequences)
    best: dict[str, float] = {}
    for _ in range(rounds):
        for way, plan in plans.items():
            began = perf_counter()
            minibatch = Minibatch({0: MicroBatches(sequences, plan)}, size, 1e-9, settings)
            backend.update(minibatch)
            best[way] = min(best.get(way, np.inf), perf_counter() - began)
    speeds = [size.num_tokens / best[way] for way in plans]
    return Comparison(profile, *speeds, *(len(plan) for plan in plans.values()))


def planning(profile: str) -> dict[str, float | str]:
    """Plan as many trajectories as a step of the paper has; the best of five counts."""
    lengths_of, max_tokens = PLANNED[profile]
    drawn = np.random.default_rng(0)
    if lengths_of:
        lengths = lengths_of.draw(drawn, NUM_PLANNED).tolist()
    else:
        lengths = np.where(drawn.random(NUM_PLANNED) < 0.03, 16_384, 200).tolist()
    seconds = []
    for _ in range(5):
        began = perf_counter()
        packed = pack_first_fit_decreasing(lengths, max_tokens=max_tokens)
        seconds.append(perf_counter() - began)
    bound = -(-sum(lengths) // max_tokens)
    fill = sum(lengths) / len(packed) / max_tokens
    found = {"seconds": min(seconds), "fill": fill, "micro_batches": len(packed), "bound": bound}
    return {"profile": profile, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    compared = [compare(name, arguments.sequences, arguments.rounds) for name in PROFILES]
    table = Table(title="Trained tokens a second, 0.6M parameters, one thread")
    for label in ("lengths", "dynamic", "fixed count", "gain", "micro-batches", "of fixed count"):
        table.add_column(label, justify="right")
    for c in compared:
        counts = (str(c.dynamic_micro_batches), str(c.fixed_micro_batches))
        speeds = (f"{c.dynamic:,.0f}", f"{c.fixed:,.0f}", f"{c.dynamic / c.fixed - 1:.0%}")
        table.add_row(c.profile, *speeds, *counts)
    Console(width=110).print(table)
    planned = [planning(name) for name in PLANNED]
    for p in planned:
        print(
            f"{NUM_PLANNED:,} lengths, {p['profile']}: planned in {p['seconds'] * 1e3:.0f} ms, "
            f"{p['fill']:.1%} full, {p['micro_batches']} micro-batches, {p['bound']} at least"
        )
    if arguments.json:
        report = {"compared": [asdict(c) for c in compared], "planned": planned}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
