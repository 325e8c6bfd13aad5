"""What the hashes of weights cost those who wait: a training step, and decoding beside a load.

    python -m benchmarks.hashing [--layers 28] [--directory DIR] [--json FILE]

Random weights of Qwen2.5-1.5B's shapes, float32, served as bfloat16. A trainer rank stages them as
after every step, and once more without any hash: what lies between is what a step waits for hashes.
Then an engine's thread decodes while the same file is read, verified and put in place; its longest
pause is told.
Needs 16 GB of memory and 4 GB for files; with fewer layers, less. The best of three.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import xxhash
from torch import Tensor

from areal_flow.config import Recipe, build_recipe
from areal_flow.generation.threaded_engine import ThreadedEngine
from areal_flow.models.hashing import hash_tensors
from areal_flow.models.huggingface import AutoConfig
from areal_flow.models.policy import assign_tensors, policy_from_config
from areal_flow.run.layout import RunLayout
from areal_flow.trainer.rank import TrainerRank
from areal_flow.types import Completion, GroupRequest
from areal_flow.weights.directory import DirectoryReader, DirectoryWriter
from benchmarks.shapes import QWEN_1_5B

NUM_BYTES = 200_000_000
"""Of the sample that two hash functions are compared on."""


def best_of_three(functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the seconds of each function's quickest call; they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(3):
        for name, function in functions.items():
            began = perf_counter()
            function()
            seconds[name].append(perf_counter() - began)
    return {name: min(found) for name, found in seconds.items()}


def gigabytes_per_second() -> dict[str, float]:
    """Return how quickly one core goes over bytes in memory, by hash function."""
    data = torch.randint(0, 255, (NUM_BYTES,), dtype=torch.uint8).numpy().data
    seconds = best_of_three(
        {"SHA-256": lambda: hashlib.sha256(data), "xxh3": lambda: xxhash.xxh3_128(data)}
    )
    return {name: NUM_BYTES / 1e9 / found for name, found in seconds.items()}


def staging(rank: TrainerRank) -> dict[str, float]:
    """Return the seconds of staging a rank's weights, with and without hashes, and of each hash."""
    weights = rank.backend.export_weights()
    served = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}

    def staged_without_hashes() -> None:
        with patch("areal_flow.models.hashing.TensorHash.add", lambda *tensor: None):
            rank.stage_initial_policy()

    seconds = best_of_three(
        {
            "staged": rank.genesis,
            "staged without hashes": staged_without_hashes,
            "served hashed": lambda: hash_tensors(served),
            "master hashed": rank.backend.fingerprint,
        }
    )
    return seconds | {"waited": seconds["staged"] - seconds["staged without hashes"]}


class PausedBy:
    """An `EngineCore` that multiplies small matrices for ever and notes its longest pause."""

    def __init__(self, policy: Any) -> None:
        self.version = 0
        self.switch_s = self.longest_pause_s = 0.0
        self.num_steps = 0
        self._policy = policy
        self._factor = torch.rand(256, 256)
        self._before = perf_counter()

    def add(self, request: GroupRequest) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def has_work(self) -> bool:
        return True

    def step(self) -> list[tuple[str, list[Completion]]]:
        self._factor @ self._factor
        now = perf_counter()
        self.longest_pause_s = max(self.longest_pause_s, now - self._before)
        self.num_steps, self._before = self.num_steps + 1, now
        return []

    def load_weights(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        began = perf_counter()
        assign_tensors(self._policy, tensors)
        self.version = version
        self.switch_s, self._before = perf_counter() - began, perf_counter()


async def loading(policy: Any, reader: DirectoryReader) -> dict[str, float]:
    """Return the seconds of a load beside a decoding engine, and what the engine noticed of it."""
    core = PausedBy(policy)
    engine = ThreadedEngine(core)
    await asyncio.sleep(1.0)
    quiet_pause_s, quiet_steps = core.longest_pause_s, core.num_steps
    core.longest_pause_s = 0.0
    began = perf_counter()
    await engine.load_weights(1, reader)
    load_s = perf_counter() - began
    verified_s = load_s - core.switch_s
    found = {
        "load": load_s,
        "of it the switch": core.switch_s,
        "longest pause but for the switch": core.longest_pause_s,
        "longest pause without a load": quiet_pause_s,
        "share of decode steps": (core.num_steps - quiet_steps) / verified_s / quiet_steps,
    }
    engine.close()
    return found


def measure(num_layers: int, directory: Path) -> dict[str, Any]:
    """Stage a random policy as a trainer rank does, then load it as a generator does."""
    config = AutoConfig.for_model("qwen2", num_hidden_layers=num_layers, **QWEN_1_5B)
    recipe: Recipe = build_recipe({"generation": {"dtype": "bfloat16"}}, source="")
    writer = DirectoryWriter(directory / "weights")

    def no_rows(trajectory_ids: object) -> Any:
        raise NotImplementedError

    rank = TrainerRank(RunLayout(directory), recipe, channel=writer, read_rows=no_rows)
    rank.adopt(policy_from_config(config))
    num_parameters = sum(tensor.numel() for tensor in rank.backend.export_weights().values())
    found: dict[str, Any] = {
        "num_parameters": num_parameters,
        "gigabytes_per_s": gigabytes_per_second(),
        "staging_s": staging(rank),
    }
    writer.stage(1, {n: t.to(torch.bfloat16) for n, t in rank.backend.export_weights().items()})
    writer.publish(1)
    del rank
    serving = policy_from_config(config, dtype="bfloat16")
    return found | {"loading_s": asyncio.run(loading(serving, writer))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--directory", type=Path, help="in memory, to leave the disk out")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        found = measure(arguments.layers, Path(scratch))
    print(json.dumps(found, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
