"""Peak memory of each trainer rank, and its seconds, by what holds the policy.

Two processes start from a checkpoint, make two steps, stage the weights (the leader into a
directory) and write a checkpoint: once with a whole policy each, once with half of every tensor.
Beside the peaks is what arithmetic asks for: weights, gradients and both moments, in float32. The
processes have glibc's own defaults: a worker keeps up to 2 GiB of what it has freed for its next
step, which at this size would hide the rest.

    python -m benchmarks.sharding [--hidden 1024] [--layers 16] [--ranks 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config

from areal_flow.algorithms.clipped import DecoupledPPO
from areal_flow.config import TrainerSettings
from areal_flow.models.policy import policy_from_config
from areal_flow.recovery.checkpoints import CheckpointState
from areal_flow.run.lease import Writer
from areal_flow.trainer.backend import make_backend
from areal_flow.trainer.checkpoint import (
    Snapshot,
    complete_checkpoint,
    read_checkpoint,
    write_checkpoint,
    write_part,
)
from areal_flow.trainer.replicas import GlooGroup
from areal_flow.trainer.sequences import TrainingSequence
from areal_flow.trainer.step import train_step
from areal_flow.trainer.tensor_rows import rows_of
from areal_flow.trainer.updates import StepSettings
from areal_flow.types import Rendezvous
from areal_flow.weights.channel import HashingWriter
from areal_flow.weights.directory_deltas import DeltaWriter

VOCABULARY = 32_000
BACKENDS = ("replicated", "fsdp")
NUM_STEPS = 2


def policy(arguments: argparse.Namespace, *, device: str = "cpu") -> torch.nn.Module:
    heads = max(1, arguments.hidden // 64)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=True,
        pad_token_id=None,
    )
    made: torch.nn.Module = policy_from_config(config, device=device)
    return made


def sequences(step: int) -> list[TrainingSequence]:
    drawn = np.random.default_rng(step)
    return [
        TrainingSequence(
            prompt_tokens=drawn.integers(0, VOCABULARY, 16).astype(np.int32),
            output_tokens=drawn.integers(0, VOCABULARY, 16).astype(np.int32),
            behavior_logprobs=np.full(16, -np.log(VOCABULARY), np.float32),
            trained=np.ones(16, np.bool_),
            reward=float(member % 2),
            group=member // 4,
        )
        for member in range(16)
    ]


def measure(rank: int, directory: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Be one rank, in this process."""
    torch.set_num_threads(1)
    num_ranks = arguments.ranks
    meeting = Rendezvous(arguments.one, rank, num_ranks)
    replicas = GlooGroup(meeting, directory / f"point-{arguments.one}", host="127.0.0.1")
    settings = TrainerSettings(backend=arguments.one, tokens_per_micro_batch=256)
    if arguments.one == "fsdp":
        with torch.device("meta"):
            empty = policy(arguments, device="meta")
    else:
        empty = policy(arguments)
    backend = make_backend(empty, settings, replicas)
    read_checkpoint(directory / "checkpoints" / "00000000", backend)
    how = StepSettings(
        DecoupledPPO(), temperature=1.0, seed=0, num_ranks=num_ranks, replicas=replicas
    )
    began = perf_counter()
    for step in range(1, NUM_STEPS + 1):
        train_step(backend, sequences(step), step=step, settings=how)
    trained, peak_of_steps = perf_counter(), _peak_bytes()
    weights = directory / f"weights-{arguments.one}"
    channel = DeltaWriter(weights) if replicas.leads else HashingWriter()
    hashes = backend.stage(NUM_STEPS, channel, dtype=torch.float32)
    staged = perf_counter()
    if replicas.leads or backend.is_sharded:
        snapshot = Snapshot(
            backend.save(),
            CheckpointState(NUM_STEPS, hashes.weights_hash, 0, ""),
            random_state=rows_of(torch.get_rng_state(), whole=replicas.leads)
            if backend.is_sharded
            else torch.get_rng_state(),
            attempt=replicas.name,
        )
        write_part(directory / "checkpoints", snapshot, Writer(directory / "writers", 1))
    replicas.gather({rank: torch.ones(1)})
    if replicas.leads:
        root, model = directory / "checkpoints", directory / "model"
        complete_checkpoint(root, model, snapshot, Writer(directory / "writers", 1))
    return {
        "peak_bytes_of_steps": peak_of_steps,
        "peak_bytes": _peak_bytes(),
        "step_seconds": (trained - began) / NUM_STEPS,
        "stage_seconds": staged - trained,
        "checkpoint_seconds": perf_counter() - staged,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--one", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.rank, arguments.directory, arguments)))
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        num_bytes, empty_bytes = _begin(directory, arguments)
        rows = [
            {"backend": backend, "rank": rank, **found}
            for backend in BACKENDS
            for rank, found in enumerate(_in_own_processes(backend, directory, arguments))
        ]
    table = Table(title=f"Trainer ranks of {num_bytes / 4e6:.0f}M parameters")
    labels = ("backend", "rank", "state, GB", "peak of steps, GB", "peak of all, GB")
    for label in (*labels, "step, s", "stage, s", "write, s"):
        table.add_column(label, justify="right")
    for row in rows:
        state = 4 * num_bytes / (arguments.ranks if row["backend"] == "fsdp" else 1)
        seconds = (row["step_seconds"], row["stage_seconds"], row["checkpoint_seconds"])
        sizes = (state, row["peak_bytes_of_steps"], row["peak_bytes"])
        cells = [f"{number:.2f}" for number in (*(size / 1e9 for size in sizes), *seconds)]
        table.add_row(str(row["backend"]), str(row["rank"]), *cells)
    Console(width=100).print(table)
    Console(width=100).print(f"torch and all imports alone: {empty_bytes / 1e9:.2f} GB")
    if arguments.json:
        found = {"weight_bytes": num_bytes, "import_bytes": empty_bytes, "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def _begin(directory: Path, arguments: argparse.Namespace) -> tuple[int, int]:
    """Write the checkpoint that all start from; return the bytes of its weights, and of imports."""
    empty_bytes = _peak_bytes()
    (directory / "model").mkdir()
    backend = make_backend(policy(arguments), TrainerSettings())
    state = CheckpointState(0, backend.fingerprint(), 0, "")
    snapshot, writer = Snapshot(backend.save(), state), Writer(directory / "writers", 1)
    write_checkpoint(directory / "checkpoints", directory / "model", snapshot, writer)
    return sum(tensor.nbytes for tensor in backend.export_weights().values()), empty_bytes


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _in_own_processes(
    backend: str, directory: Path, arguments: argparse.Namespace
) -> list[dict[str, float]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.sharding", *sys.argv[1:], "--one", backend]
    processes = [
        subprocess.Popen(
            [*command, "--rank", str(rank), "--directory", str(directory)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(arguments.ranks)
    ]
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"{backend}: a rank failed")
    return [json.loads(text) for text in said]


if __name__ == "__main__":
    main()
