"""Peak memory and time of one optimizer update on one trajectory, by its length.

The policy is narrow, but its vocabulary is real: 152k. Each length is trained by a process of its
own with a trainer's environment. Its peak counts everything in it: torch, weights, gradients, both
moments of AdamW, and what the pass needs. Beside it is the size of all logits, once. With
`--ranks` so many processes share the trajectory's tokens; peak and time are the largest of theirs.

    python -m benchmarks.long_context [--lengths 1024 ... 32768] [--ranks 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from areal_flow.algorithms.registry import DecoupledPPO
from areal_flow.cluster.placement import PROCESS_ENVIRONMENT, worker_environment
from areal_flow.core.types import Rendezvous
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.replicas import ReplicaGroup, connect_ranks
from areal_flow.training.settings import ParallelSettings, StepSettings, TrainerSettings
from areal_flow.training.step import train_step
from benchmarks import harness
from benchmarks.shapes import random_policy, random_trajectory

VOCABULARY, PROMPT_TOKENS, HEAD_DIMENSION = 151_936, 128, 32


def measure_rank(
    num_tokens: int, rank: int, point: Path, chosen: argparse.Namespace
) -> tuple[float, float]:
    """Make one update in this process; return its peak in GB and its seconds."""
    torch.set_num_threads(chosen.threads)
    heads = chosen.hidden // HEAD_DIMENSION
    shape = {"heads": heads, "key_value_heads": max(1, heads // 4)}
    shape |= {"max_position_embeddings": num_tokens}
    policy = random_policy(VOCABULARY, chosen.hidden, chosen.layers, **shape)
    replicas: ReplicaGroup = ReplicaGroup()
    if chosen.ranks > 1:
        rendezvous = Rendezvous("ranks", rank, chosen.ranks)
        replicas = connect_ranks(rendezvous, point, host="127.0.0.1")
    trainer = TrainerSettings(
        tokens_per_micro_batch=num_tokens,
        activations=chosen.activations,
        parallel=ParallelSettings(context_ranks=chosen.ranks),
    )
    backend = TrainerBackend(policy, trainer, replicas)
    algorithm = DecoupledPPO(num_minibatches=1)
    settings = StepSettings(algorithm, temperature=1.0, seed=0)
    sequences = [random_trajectory(PROMPT_TOKENS, num_tokens - PROMPT_TOKENS, VOCABULARY)]
    seconds = harness.seconds_of(lambda: train_step(backend, sequences, step=1, settings=settings))
    return harness.peak_gb(), seconds


def measure(num_tokens: int, chosen: argparse.Namespace) -> dict[str, float]:
    environment = {**PROCESS_ENVIRONMENT, **worker_environment(chosen.threads)}
    with tempfile.TemporaryDirectory() as directory:
        point = Path(directory) / "point"
        calls = [(num_tokens, rank, point, chosen) for rank in range(chosen.ranks)]
        peaks, seconds = zip(*harness.in_processes(measure_rank, calls, environment), strict=True)
    figures = {"tokens": num_tokens, "peak_gb": max(peaks), "seconds": max(seconds)}
    return {**figures, "logits_gb": 4 * num_tokens * VOCABULARY / 1e9}


def main() -> None:
    numbers = {"hidden": 128, "layers": 2, "threads": 2, "ranks": 1}
    names = {"lengths": [1024 * 2**power for power in range(6)], "activations": "keep"}
    choices = {"activations": ("keep", "recompute", "offload")}
    chosen = harness.parse_options(__doc__, choices=choices, **names, **numbers)
    rows = [measure(num_tokens, chosen) for num_tokens in chosen.lengths]
    sizes = ", ".join(f"{name} {getattr(chosen, name)}" for name in (*numbers, "activations"))
    harness.report(chosen.json, {f"One update on one trajectory: {sizes}": rows})


if __name__ == "__main__":
    main()
