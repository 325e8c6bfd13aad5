"""Training steps of a 1.5B-shaped policy on one GPU: tokens/s, TFLOP/s, MFU.

Random weights of Qwen2.5-1.5B's shapes, float32 masters, bfloat16 passes, compiled layers. A step
is one update on one trajectory. Operations are those that `areal_flow/training/flops.py` counts.
MFU is of the bfloat16 rate in the GPU's data sheet; beside it stands the share of the rate that
large random matrices reach in the same process. Goal on a GPU: 45% of the latter.

Then it measures what happens between two steps: weights are staged in shared memory and published,
and a snapshot is taken. The first versions take new pages, later ones those of retired versions.
`hash_s` is what hashing the masters alone takes, `snapshot_copy_s` how long a snapshot is copied
beside the next step, of which only the part after its gradients delays it.

    python -m benchmarks.gpu_step [--lengths 16384 32768] [--layers 28] [--json FILE]

Needs 50 GB of GPU memory. `--device cpu --layers 1 --hidden 128 --lengths 256` tries it anywhere.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Literal, get_args

import torch

from areal_flow.algorithms.registry import DecoupledPPO
from areal_flow.policy.checkpoints import CheckpointState
from areal_flow.policy.models.policy import DTYPES
from areal_flow.policy.weights.directory import KEEP_VERSIONS
from areal_flow.policy.weights.shared_memory import ChosenChannel, free_segments
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.checkpoint import take_snapshot
from areal_flow.training.flops import PolicyShape, device_peak_rate, matrix_rate
from areal_flow.training.ranked_model import wait_for_copies
from areal_flow.training.settings import StepSettings, TrainerSettings
from areal_flow.training.step import train_step
from benchmarks import harness
from benchmarks.shapes import random_policy, random_trajectory

VOCABULARY = 151_936
HEAD_DIMENSION, GROUPED = 128, 6
"""As Qwen2.5-1.5B has them: six heads share keys and values."""
DTYPE: Literal["bfloat16"] = "bfloat16"


def measure(backend: TrainerBackend, num_tokens: int, num_steps: int) -> dict[str, float]:
    """Return the speed of steps on a trajectory of this many tokens, an eighth of them prompt."""
    device, algorithm = backend.settings.device, DecoupledPPO(num_minibatches=1)
    on_gpu = device.startswith("cuda")
    settings = StepSettings(algorithm, temperature=1.0, seed=0)
    num_prompt = num_tokens // 8
    vocabulary = backend.policy.config.vocab_size
    sequences = [random_trajectory(num_prompt, num_tokens - num_prompt, vocabulary)]
    shape = PolicyShape.of(backend.policy)
    assert shape is not None

    def train(*steps: int) -> None:
        for step in steps:
            train_step(backend, sequences, step=step, settings=settings)
            if on_gpu:
                torch.cuda.synchronize(device)

    train(1)  # prepares
    seconds = harness.seconds_of(lambda: train(*range(2, num_steps + 2))) / num_steps
    flops = shape.step_flops(sequences, [[[[0]]]], algorithm) / seconds  # one row of one sequence
    peak = device_peak_rate(device, DTYPE)
    return {
        "num_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
        "tflops": flops / 1e12,
        **({"mfu": flops / peak} if peak else {}),
        "of_matrix_rate": flops / matrix_rate(device, DTYPE),
        "peak_gb": torch.cuda.max_memory_allocated(device) / 1e9 if on_gpu else 0.0,
    }


def measure_between(backend: TrainerBackend) -> dict[str, float]:
    """Return the seconds between the end of a step and the start of the next."""
    with TemporaryDirectory() as scratch:
        channel = ChosenChannel(Path(scratch) / "weights", "auto")

        def stage(version: int) -> None:
            backend.stage(version, channel, dtype=DTYPES[DTYPE])

        def publish(version: int) -> None:
            channel.publish(version)

        versions = range(KEEP_VERSIONS + 5)
        try:
            seconds = [
                [harness.seconds_of(partial(part, version)) for part in (stage, publish)]
                for version in versions
            ]
        finally:
            free_segments(channel.root)
    description = CheckpointState(0, "", 0, "")
    stage_s, publish_s = (median(times[-3:]) for times in zip(*seconds, strict=True))
    began = perf_counter()
    snapshot = take_snapshot(backend, description)
    snapshot_s = perf_counter() - began
    wait_for_copies(snapshot.copies)
    copy_s = perf_counter() - began
    return {
        "first_stage_s": seconds[0][0],
        "stage_s": stage_s,
        "publish_s": publish_s,
        "hash_s": harness.seconds_of(backend.fingerprint),
        "snapshot_s": snapshot_s,
        "snapshot_copy_s": copy_s,
        "between_s": stage_s + publish_s + snapshot_s,
    }


def main() -> None:
    numbers = {"lengths": [16_384, 32_768], "layers": 28, "hidden": 1536, "steps": 3}
    numbers |= {"vocabulary": VOCABULARY, "recomputed_layers": 1.0}
    fields = TrainerSettings.model_fields
    choices = {name: get_args(fields[name].annotation) for name in ("activations", "kernels")}
    names = {"activations": "recompute", "kernels": "compiled", "device": "cuda"}
    chosen = harness.parse_options(__doc__, choices=choices, **numbers, **names)
    device = chosen.device
    if device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("expected an NVIDIA GPU, found none; --device cpu tries it without")
    heads = max(1, chosen.hidden // HEAD_DIMENSION)
    shape = {"heads": heads, "key_value_heads": max(1, heads // GROUPED)}
    shape |= {"intermediate_size": 35 * chosen.hidden // 6, "max_position_embeddings": 32_768}
    sizes = (chosen.vocabulary, chosen.hidden, chosen.layers)
    policy = random_policy(*sizes, device=device, **shape)
    settings = TrainerSettings(
        device=device,
        dtype=DTYPE,
        activations=chosen.activations,
        recomputed_layers=chosen.recomputed_layers,
        kernels=chosen.kernels,
        tokens_per_micro_batch=max(chosen.lengths),
    )
    backend = TrainerBackend(policy, settings)
    rows = [measure(backend, length, chosen.steps) for length in chosen.lengths]
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    rate = matrix_rate(device, DTYPE) / 1e12
    title = f"Steps with `{chosen.activations}`, {chosen.layers} layers of width {chosen.hidden}"
    title += f"; {name} multiplies random {DTYPE} matrices at {rate:,.1f} TFLOP/s"
    if peak := device_peak_rate(device, DTYPE):
        title += f", its data sheet says {peak / 1e12:,.1f}"
    harness.report(chosen.json, {title: rows, "Between two steps": [measure_between(backend)]})


if __name__ == "__main__":
    main()
