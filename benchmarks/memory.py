"""Peak memory of a step: predicted by `areal-flow plan --memory`, and measured in a process.

Each case is trained by a process of its own: two steps with full micro-batches. What it had after a
step of a tiny policy (torch, its threads and imports) is taken off its peak. Freed memory goes back
to the system at once. On a GPU the peak is what torch's allocator gave, in bfloat16 passes.
Predictions need no GPU: `--predict` makes them alone, on any machine and before, into the file that
`--predictions` names, and a run with that file takes them from it.

    python -m benchmarks.memory [--hidden 256] [--layers 4] [--tokens 1024 4096] [--device cuda]
        [--model DIR] [--dtype bfloat16] [--cases keep] [--predictions FILE] [--predict]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import psutil
import torch

from areal_flow.config import Recipe, build_recipe
from areal_flow.core.layout import RunLayout
from areal_flow.planning.costs import model_config
from areal_flow.planning.gpus import gpu_bytes
from areal_flow.planning.memory import longest_rows, longest_sequences, trainer_memory
from areal_flow.policy.weights.channel import HashingWriter
from areal_flow.training.rank import TrainerRank
from areal_flow.training.step import train_step
from benchmarks import harness
from benchmarks.shapes import drawn_policy, qwen2_config

VOCABULARY = 32_000
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
CASES: dict[str, dict[str, Any]] = {
    "keep": {},
    "selective": {"activations": "selective"},
    "recompute": {"activations": "recompute"},
    "adapter": {"lora": {"rank": 8}},
}


def config_of(hidden: int, layers: int) -> Any:
    heads = max(1, hidden // 64)
    return qwen2_config(
        VOCABULARY, hidden, layers, heads=heads, key_value_heads=1, max_position_embeddings=65_536
    )


def chosen_config(chosen: argparse.Namespace) -> Any:
    if chosen.model:
        return model_config(chosen.model)
    return config_of(chosen.hidden, chosen.layers)


def recipe_of(case: str, tokens: int, device: str = "cpu", dtype: str | None = None) -> Recipe:
    dtype = dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    trainer = {"tokens_per_micro_batch": tokens, "device": device, "dtype": dtype, **CASES[case]}
    return build_recipe({"trainer": trainer, "algorithm": {"num_minibatches": 1}}, source="")


def train(recipe: Recipe, config: Any) -> None:
    rank = TrainerRank(
        RunLayout(Path()), recipe.for_trainer(), channel=HashingWriter(), read_rows=lambda _: []
    )
    backend = rank.adopt(drawn_policy(config, device=recipe.trainer.device))
    for step in (1, 2):
        sequences = longest_sequences(longest_rows(recipe), num_batches=1)
        train_step(backend, sequences, step=step, settings=rank.settings)


def measure(case: str, tokens: int, chosen: argparse.Namespace) -> float:
    """Return this process's peak in GB, without its baseline."""
    torch.set_num_threads(1)
    train(recipe_of(case, 64, chosen.device, chosen.dtype), config_of(64, 1))
    own = psutil.Process().memory_info().rss / 1e9
    train(recipe_of(case, tokens, chosen.device, chosen.dtype), chosen_config(chosen))
    if chosen.device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(chosen.device) / 1e9
    return float(harness.peak_gb() - own)


def predict(case: str, tokens: int, chosen: argparse.Namespace) -> float:
    """Return the prediction of `plan --memory` in GB, computed on one CPU core."""
    torch.set_num_threads(1)
    recipe = recipe_of(case, tokens, chosen.device, chosen.dtype)
    num_bytes = gpu_bytes(chosen.gpu)
    (rank,) = trainer_memory(recipe, chosen_config(chosen), device_bytes=num_bytes)
    return rank.peak_bytes / 1e9


def main() -> None:
    sizes = {"hidden": 256, "layers": 4, "model": str, "tokens": [1024], "device": "cpu"}
    others = {"dtype": str, "cases": [*CASES], "predictions": Path, "predict": False}
    others["gpu"] = "H100-80GB"
    chosen = harness.parse_options(__doc__, **sizes, **others)
    calls = [(case, tokens, chosen) for case in chosen.cases for tokens in chosen.tokens]
    if chosen.predictions and chosen.predictions.exists():
        peaks = json.loads(chosen.predictions.read_text())
    else:
        peaks = harness.in_processes(predict, calls, ENVIRONMENT)
    if chosen.predict:
        chosen.predictions.write_text(json.dumps(peaks))
        return
    rows = []
    for (case, tokens, _), predicted in zip(calls, peaks, strict=True):
        (measured,) = harness.in_processes(measure, [(case, tokens, chosen)], ENVIRONMENT)
        figures = {"predicted_gb": predicted, "measured_gb": measured}
        rows.append({"case": case, "tokens": tokens, **figures, "ratio": predicted / measured})
    title = f"Width {chosen.hidden}, {chosen.layers} layers, a vocabulary of {VOCABULARY:,}"
    if chosen.model:
        title = f"{Path(chosen.model).name}, {chosen.dtype or 'float32'}"
    harness.report(chosen.json, {title: rows})


if __name__ == "__main__":
    main()
