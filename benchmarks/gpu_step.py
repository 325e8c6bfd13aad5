"""Training steps of a 1.5B-shaped policy on one GPU: tokens/s, TFLOP/s, share of its matrix rate.

Random weights of Qwen2.5-1.5B's shapes, float32 masters, bfloat16 passes, layers recomputed. A step
is one update on one trajectory of each length; the first one is left out. Operations are those
that the formula asks for (`areal_flow/trainer/flops.py`), and the rate is that of large
matrices in the same process. Goal on a GPU: 45%.

    python -m benchmarks.gpu_step [--lengths 16384 32768] [--layers 28] [--steps 3]
                                  [--activations recompute] [--device cuda] [--json FILE]

Needs 50 GB of GPU memory; with fewer layers less. `--device cpu --layers 1 --lengths 256` tries it
anywhere.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from areal_flow.algorithms.clipped import DecoupledPPO
from areal_flow.config import TrainerSettings
from areal_flow.models.policy import policy_from_config
from areal_flow.trainer.flops import PolicyShape, matrix_rate
from areal_flow.trainer.replicated import ReplicatedBackend
from areal_flow.trainer.sequences import TrainingSequence
from areal_flow.trainer.step import train_step
from areal_flow.trainer.updates import StepSettings
from areal_flow.types import VersionSpan
from benchmarks.shapes import QWEN_1_5B

DTYPE = "bfloat16"


def trajectory(num_tokens: int) -> TrainingSequence:
    """Return one of which an eighth is prompt."""
    vocabulary = QWEN_1_5B["vocab_size"]
    tokens = np.random.default_rng(0).integers(0, vocabulary, num_tokens).astype(np.int32)
    num_prompt = num_tokens // 8
    num_sampled = num_tokens - num_prompt
    return TrainingSequence(
        prompt_tokens=tokens[:num_prompt],
        output_tokens=tokens[num_prompt:],
        behavior_logprobs=np.full(num_sampled, -np.log(vocabulary), np.float32),
        trained=np.ones(num_sampled, np.bool_),
        reward=1.0,
        group=0,
        version_spans=(VersionSpan(0, num_sampled),),
    )


def measure(backend: ReplicatedBackend, num_tokens: int, num_steps: int) -> dict[str, float]:
    """Return the speed of steps on a trajectory of so many tokens."""
    device = backend.settings.device
    on_gpu = device.startswith("cuda")
    algorithm = DecoupledPPO(num_minibatches=1)
    settings = StepSettings(algorithm, temperature=1.0, seed=0)
    sequences = [trajectory(num_tokens)]
    shape = PolicyShape.of(backend.policy)
    assert shape is not None
    began = 0.0
    for step in range(num_steps + 1):
        if step == 1:  # the first one prepares
            began = perf_counter()
        train_step(backend, sequences, step=step + 1, settings=settings)
        if on_gpu:
            torch.cuda.synchronize(device)
    seconds = (perf_counter() - began) / num_steps
    of_one_row = [[[[0]]]]
    flops = shape.step_flops(sequences, of_one_row, algorithm) / seconds
    return {
        "num_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "tflops": flops / 1e12,
        "utilization": flops / matrix_rate(device, DTYPE),
        "peak_bytes": float(torch.cuda.max_memory_allocated(device)) if on_gpu else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[16_384, 32_768])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--steps", type=int, default=3)
    choices = ("keep", "recompute", "offload")
    parser.add_argument("--activations", default="recompute", choices=choices)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("expected an NVIDIA GPU, found none; --device cpu tries it without")
    shape: dict[str, Any] = {**QWEN_1_5B, "max_position_embeddings": max(arguments.lengths)}
    config = AutoConfig.for_model("qwen2", num_hidden_layers=arguments.layers, **shape)
    settings = TrainerSettings(
        device=arguments.device,
        dtype=DTYPE,
        activations=arguments.activations,
        tokens_per_micro_batch=max(arguments.lengths),
    )
    backend = ReplicatedBackend(policy_from_config(config, device=arguments.device), settings)
    rows = [measure(backend, length, arguments.steps) for length in arguments.lengths]
    on_gpu = arguments.device.startswith("cuda")
    name = torch.cuda.get_device_name(arguments.device) if on_gpu else "CPU"
    rate = matrix_rate(arguments.device, DTYPE) / 1e12
    table = Table(title=f"{name}: {rate:,.1f} TFLOP/s of {DTYPE} matrices")
    for label in ("tokens", "s/step", "tokens/s", "TFLOP/s", "utilization", "peak, GB"):
        table.add_column(label, justify="right")
    for row in rows:
        table.add_row(
            f"{row['num_tokens']:,}",
            f"{row['seconds']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tflops']:.2f}",
            f"{row['utilization']:.0%}",
            f"{row['peak_bytes'] / 1e9:.1f}",
        )
    Console(width=100).print(table)
    if arguments.json:
        found = {"device": name, "layers": arguments.layers, "matrix_tflops": rate, "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
