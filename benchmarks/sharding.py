"""Peak memory and seconds per step of each trainer rank, by the number of ranks.

Processes start from a checkpoint and make two steps of 16 short sequences: once one alone with the
whole policy, once several with a part of every tensor each. `state_gb` is weights, gradients and
both moments in float32. The allocator's settings are glibc's: a worker's keep up to 2 GiB that it
has freed.

    python -m benchmarks.sharding [--hidden 1024] [--layers 16] [--ranks 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from areal_flow.algorithms.registry import DecoupledPPO
from areal_flow.core.lease import Writer
from areal_flow.core.types import Rendezvous
from areal_flow.policy.checkpoints import CheckpointState
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.checkpoint import read_checkpoint, take_snapshot, write_checkpoint
from areal_flow.training.replicas import ReplicaGroup, connect_ranks
from areal_flow.training.settings import StepSettings, TrainerSettings
from areal_flow.training.step import train_step
from benchmarks import harness
from benchmarks.shapes import random_policy, random_trajectory

VOCABULARY, NUM_STEPS = 32_000, 2


def make_policy(chosen: argparse.Namespace, device: str = "cpu") -> Any:
    heads = max(1, chosen.hidden // 64)
    sizes = (VOCABULARY, chosen.hidden, chosen.layers)
    with torch.device(device):
        return random_policy(*sizes, device=device, heads=heads, key_value_heads=heads)


def write_first_checkpoint(directory: Path, chosen: argparse.Namespace) -> int:
    """Write the common first checkpoint; return the size of its weights in bytes."""
    (directory / "model").mkdir()
    backend = TrainerBackend(make_policy(chosen), TrainerSettings())
    state = CheckpointState(0, backend.fingerprint(), 0, "")
    snapshot, writer = take_snapshot(backend, state), Writer(directory / "writers", 1)
    write_checkpoint(directory / "checkpoints", directory / "model", snapshot, writer)
    return sum(rows.values.nbytes for rows in backend.save()[0].values())


def measure_rank(
    num_ranks: int, rank: int, directory: Path, chosen: argparse.Namespace
) -> dict[str, float]:
    """Train as one rank, in this process."""
    torch.set_num_threads(1)
    replicas: ReplicaGroup = ReplicaGroup()
    if num_ranks > 1:
        rendezvous = Rendezvous("ranks", rank, num_ranks)
        replicas = connect_ranks(rendezvous, directory / "point", host="127.0.0.1")
    policy = make_policy(chosen, "cpu" if replicas.is_single_process else "meta")
    settings = TrainerSettings(tokens_per_micro_batch=256)
    backend = TrainerBackend(policy, settings, replicas)
    read_checkpoint(directory / "checkpoints" / "00000000", backend)
    how = StepSettings(DecoupledPPO(), temperature=1.0, seed=0)
    sequences = [
        random_trajectory(16, 16, VOCABULARY, seed=place, reward=place % 2, group=place // 4)
        for place in range(16)
    ]

    def train() -> None:
        for step in range(1, NUM_STEPS + 1):
            train_step(backend, sequences, step=step, settings=how)

    step_s = harness.seconds_of(train) / NUM_STEPS
    return {"peak_gb": harness.peak_gb(), "step_s": step_s}


def main() -> None:
    chosen = harness.parse_options(__doc__, hidden=1024, layers=16, ranks=2)
    imports_gb = harness.peak_gb()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        num_bytes = write_first_checkpoint(directory, chosen)
        for num_ranks in (1, chosen.ranks):
            calls = [(num_ranks, rank, directory, chosen) for rank in range(num_ranks)]
            figures_by_rank = harness.in_processes(measure_rank, calls, {"OMP_NUM_THREADS": "1"})
            own = {"ranks": num_ranks, "state_gb": 4e-9 * num_bytes / num_ranks}
            rows += [
                {**own, "rank": rank, **figures} for rank, figures in enumerate(figures_by_rank)
            ]
    title = f"Ranks of {num_bytes / 4e6:.0f}M parameters; torch and imports: {imports_gb:.2f} GB"
    harness.report(chosen.json, {title: rows})


if __name__ == "__main__":
    main()
