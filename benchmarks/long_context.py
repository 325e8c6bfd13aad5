"""Peak memory and time of one optimizer update on one trajectory, by its length.

The policy is narrow, but its vocabulary is real: 152k. Each length is trained by a process of its
own, whose peak is that of everything in it: torch, weights, gradients, both moments of AdamW, and
what the pass needs. Beside it, what the logits alone would take if all were there at once, once.

With ranks, so many processes share the trajectory's tokens; the peak is that of the greediest.

    python -m benchmarks.long_context [--lengths 1024 ... 32768] [--hidden 128] [--layers 2]
                                      [--activations keep] [--threads 2] [--ranks 1] [--json FILE]
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
from areal_flow.cluster.placement import PROCESS_ENVIRONMENT, worker_environment
from areal_flow.config import ParallelSettings, TrainerSettings
from areal_flow.models.policy import policy_from_config
from areal_flow.trainer.backend import make_backend
from areal_flow.trainer.replicas import GlooGroup, ReplicaGroup, SingleProcess
from areal_flow.trainer.sequences import TrainingSequence
from areal_flow.trainer.step import train_step
from areal_flow.trainer.updates import StepSettings
from areal_flow.types import Rendezvous, VersionSpan

VOCABULARY = 151_936
PROMPT_TOKENS = 128
HEAD_DIMENSION = 32


def trajectory(num_tokens: int) -> TrainingSequence:
    drawn = np.random.default_rng(0)
    tokens = drawn.integers(0, VOCABULARY, num_tokens).astype(np.int32)
    num_sampled = num_tokens - PROMPT_TOKENS
    return TrainingSequence(
        prompt_tokens=tokens[:PROMPT_TOKENS],
        output_tokens=tokens[PROMPT_TOKENS:],
        behavior_logprobs=np.full(num_sampled, -np.log(VOCABULARY), np.float32),
        trained=np.ones(num_sampled, np.bool_),
        reward=1.0,
        group=0,
        version_spans=(VersionSpan(0, num_sampled),),
    )


def measure(num_tokens: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Make one update in this process, alone or as one of the ranks."""
    torch.set_num_threads(arguments.threads)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // HEAD_DIMENSION,
        num_key_value_heads=max(1, arguments.hidden // HEAD_DIMENSION // 4),
        max_position_embeddings=num_tokens,
        tie_word_embeddings=True,
        pad_token_id=None,
    )
    replicas: ReplicaGroup = SingleProcess()
    if arguments.ranks > 1:
        meeting = Rendezvous("ranks", arguments.rank, arguments.ranks)
        replicas = GlooGroup(meeting, arguments.point, host="127.0.0.1")
    backend = make_backend(
        policy_from_config(config),
        TrainerSettings(
            tokens_per_micro_batch=num_tokens,
            activations=arguments.activations,
            parallel=ParallelSettings(context_ranks=arguments.ranks),
        ),
        replicas,
    )
    algorithm = DecoupledPPO(num_minibatches=1)
    settings = StepSettings(
        algorithm, temperature=1.0, seed=0, context_ranks=arguments.ranks, replicas=replicas
    )
    began = perf_counter()
    train_step(backend, [trajectory(num_tokens)], step=1, settings=settings)
    seconds = perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"num_tokens": num_tokens, "peak_bytes": peak, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    lengths = [1024 * 2**power for power in range(6)]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--activations", default="keep", choices=("keep", "recompute", "offload"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--point", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments)))
        return
    rows = [_in_own_processes(num_tokens, arguments) for num_tokens in arguments.lengths]
    title = f"One update on one trajectory, vocabulary {VOCABULARY:,}, width {arguments.hidden}"
    table = Table(title=title)
    for label in ("tokens", "peak, GB", "seconds", "tokens/s", "logits once, GB"):
        table.add_column(label, justify="right")
    for row in rows:
        num_tokens, peak, seconds = row["num_tokens"], row["peak_bytes"], row["seconds"]
        logits = 4 * num_tokens * VOCABULARY / 1e9
        cells = (f"{peak / 1e9:.2f}", f"{seconds:.1f}", f"{num_tokens / seconds:,.0f}")
        table.add_row(f"{num_tokens:,}", *cells, f"{logits:.1f}")
    Console(width=100).print(table)
    if arguments.json:
        settings = {"hidden": arguments.hidden, "layers": arguments.layers}
        settings |= {"activations": arguments.activations, "threads": arguments.threads}
        settings |= {"ranks": arguments.ranks}
        arguments.json.write_text(json.dumps({**settings, "rows": rows}, indent=2) + "\n")


def _in_own_processes(num_tokens: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure in processes with a trainer's environment, as many as there are ranks."""
    environment = {**os.environ, **PROCESS_ENVIRONMENT, **worker_environment(arguments.threads)}
    command = [sys.executable, "-m", "benchmarks.long_context", *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as directory:
        command += ["--one", str(num_tokens), "--point", f"{directory}/point"]
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env=environment
            )
            for rank in range(arguments.ranks)
        ]
        said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"{num_tokens} tokens: a process failed")
    found = [json.loads(text) for text in said]
    greatest: dict[str, float] = {name: max(of[name] for of in found) for name in found[0]}
    return greatest


if __name__ == "__main__":
    main()
