"""What it costs to carry weights from the trainer to a generator, by medium, beside a plain copy.

    python benchmarks/weights.py [--models default 11M 100M] [--json FILE]

Random weights, float32. `memcpy` copies the same tensors once, in one thread. A version is staged,
hashed beside that, and published; then it is mapped or read, hashed, and copied into the policy.
Both happen once more without hashes, which shows them apart. Then engines of the default job, with
all slots decoding, get versions one after the other: how long each was read, and how long it took
to switch and to decode the step after it. Last, how many bytes a directory and a broadcast ship of
a bfloat16 version after a small step, and how long that takes beside whole files. The best of nine,
of updates the median; media take turns, and a broadcast is over loopback. Needs 9 GB of memory, 3
of them in /dev/shm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from areal_flow.config import load_recipe
from areal_flow.generation.protocol import Engine
from areal_flow.generation.registry import engine_factory
from areal_flow.models.hashing import hash_tensors
from areal_flow.models.huggingface import AutoConfig
from areal_flow.models.policy import (
    assign_tensors,
    empty_policy,
    policy_from_config,
    policy_tensors,
)
from areal_flow.types import GroupRequest, Sampling, as_tokens
from areal_flow.weights.broadcast import BroadcastReader, BroadcastWriter
from areal_flow.weights.channel import WeightsWriter
from areal_flow.weights.directory import DirectoryReader, DirectoryWriter
from areal_flow.weights.directory_deltas import DeltaReader, DeltaWriter
from areal_flow.weights.media import ChosenChannel
from areal_flow.weights.settings import Medium
from areal_flow.weights.shared_memory import free_segments
from pipelines.tiny_jobs.tiny_policy import write_tiny_model

MEDIA: tuple[Medium, ...] = ("directory", "shared_memory", "broadcast")
MODELS = ("default", "11M", "100M")
SHAPES = {
    "11M": {"vocab_size": 8192, "hidden_size": 320, "num_hidden_layers": 6},
    "100M": {"vocab_size": 16_384, "hidden_size": 768, "num_hidden_layers": 10},
}
RECIPE = Path(__file__).parents[1] / "pipelines" / "recipes" / "arithmetic.toml"
NUM_WARM = 6
"""Versions before the measured ones: from then on shared memory has pages to write again."""
NUM_UPDATES = 9
NUM_DELTAS = 12
DELTA_RATE = 1e-6
DELTA_MEDIA = ("directory", "broadcast")
HOST = "127.0.0.1"


def make_policy(name: str, directory: Path) -> Any:
    """Return a policy with random weights: the default job's, or a Qwen2 of about this size."""
    if name == "default":
        write_tiny_model(directory, max_model_len=64)
        return empty_policy(directory)
    shape = SHAPES[name]
    heads = {"num_attention_heads": shape["hidden_size"] // 64, "num_key_value_heads": 1}
    sizes = {"intermediate_size": 4 * shape["hidden_size"], "tie_word_embeddings": False}
    return policy_from_config(AutoConfig.for_model("qwen2", **shape, **heads, **sizes))


def without_hashes() -> Any:
    return patch("areal_flow.models.hashing.TensorHash.add", lambda *tensor: None)


def publish(channel: WeightsWriter, version: int, tensors: Mapping[str, Tensor]) -> None:
    channel.stage(version, tensors)
    channel.publish(version)


def load(channel: ChosenChannel, version: int, policy: Any) -> None:
    assign_tensors(policy, channel.load(version))


def timed(work: Callable[[], object]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began


def gigabytes_per_s(policy: Any, directory: Path) -> dict[str, Any]:
    """Return how quickly a policy is copied, hashed, published and loaded, by medium."""
    tensors = {name: tensor.clone() for name, tensor in policy_tensors(policy).items()}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    channels = {medium: ChosenChannel(directory / medium, medium) for medium in MEDIA}
    seconds: dict[str, list[float]] = {}
    version = 0

    def note(name: str, work: Callable[[], object]) -> None:
        taken = timed(work)
        if version >= NUM_WARM:
            seconds.setdefault(name, []).append(taken)

    try:
        for version in range(NUM_WARM + NUM_UPDATES):
            note("memcpy", lambda: assign_tensors(policy, tensors))
            note("hash", lambda: hash_tensors(tensors))
            for medium, channel in channels.items():
                note(f"{medium}, publish", partial(publish, channel, 2 * version, tensors))
                note(f"{medium}, load", partial(load, channel, 2 * version, policy))
                with without_hashes():
                    bare = 2 * version + 1
                    note(f"{medium}, publish unhashed", partial(publish, channel, bare, tensors))
                    note(f"{medium}, load unhashed", partial(load, channel, bare, policy))
    finally:
        for medium in MEDIA:
            free_segments(directory / medium)
    speeds = {name: num_bytes / 1e9 / min(taken) for name, taken in seconds.items()}
    return {"num_bytes": num_bytes, "gigabytes_per_s": speeds}


async def updates(directory: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Return what updates cost engines of the default job whose slots are all decoding."""
    model = directory / "model"
    tensors = policy_tensors(make_policy("default", model))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for interruption in ("interrupt", "keep"):
        given = {"generation": {"interruption": interruption}}
        settings = load_recipe(RECIPE, given).generation
        for medium in MEDIA:
            channel = ChosenChannel(directory / f"{interruption}, {medium}", medium)
            publish(channel, 0, tensors)
            engine = await engine_factory(settings.engine)(model, settings, channel)
            try:
                costs = await _updates_of(engine, channel, tensors)
            finally:
                engine.close()
                free_segments(channel.root)
            found.setdefault(interruption, {})[medium] = costs
    return found


async def _updates_of(
    engine: Engine, channel: ChosenChannel, tensors: Mapping[str, Tensor]
) -> dict[str, float]:
    stop = asyncio.Event()
    decoding = asyncio.gather(*(keep_decoding(engine, group, stop) for group in range(8)))
    transfers, stalls = [], []
    for version in range(1, NUM_WARM + NUM_UPDATES):
        await asyncio.sleep(0.2)
        before_s = engine.stats().stall_s
        publish(channel, version, tensors)
        await engine.load_weights(version, channel)
        assert channel.last_load is not None
        if version >= NUM_WARM:
            transfers.append(channel.last_load.transfer_s)
            stalls.append(engine.stats().stall_s - before_s)
    stop.set()
    await decoding
    return {
        "transfer_s": median(transfers),
        "stall_s": median(stalls),
        "longest_stall_s": max(stalls),
    }


async def keep_decoding(engine: Engine, group: int, stop: asyncio.Event) -> None:
    """Have 16 completions of 16 tokens decoded, again and again."""
    count = 0
    while not stop.is_set():
        seeds = tuple(range(16 * count, 16 * count + 16))
        prompt = as_tokens(range(2, 14))
        name = f"{group}-{count}"
        await engine.generate(GroupRequest(name, prompt, seeds, Sampling(max_new_tokens=16)))
        count += 1


def deltas(policy: Any, directory: Path) -> dict[str, Any]:
    """Return what media ship of AdamW's steps in bfloat16, and the time beside whole files.

    The gradients are noise. A first step moves every weight by the whole rate, the most that AdamW
    can; later ones by less, the less the gradients agree.
    """
    optimizer = torch.optim.AdamW(policy.parameters(), lr=DELTA_RATE, betas=(0.9, 0.95))
    roots = {name: directory / f"deltas, {name}" for name in ("whole", *DELTA_MEDIA)}
    sends = BroadcastWriter(roots["broadcast"], host=HOST)
    writers = {
        "whole": DirectoryWriter(roots["whole"]),
        "directory": DeltaWriter(roots["directory"]),
        "broadcast": sends,
    }
    readers = {
        "whole": DirectoryReader(roots["whole"]),
        "directory": DeltaReader(roots["directory"]),
        "broadcast": BroadcastReader(roots["broadcast"], host=HOST),
    }
    num_bytes: dict[str, list[int]] = {name: [] for name in roots}
    seconds: dict[str, list[float]] = {}
    for version in range(NUM_DELTAS + 1):
        tensors = policy_tensors(policy)
        for name, writer in writers.items():
            weights = {n: tensor.to(torch.bfloat16) for n, tensor in tensors.items()}
            staged = timed(partial(publish, writer, version, weights))
            loaded = timed(partial(readers[name].load, version))  # checks the hash
            seconds.setdefault(f"{name}, publish", []).append(staged)
            seconds.setdefault(f"{name}, load", []).append(loaded)
            if name != "broadcast":
                written = (roots[name] / f"{version:08d}").iterdir()
                num_bytes[name].append(sum(file.stat().st_size for file in written))
        assert sends.sender is not None
        num_bytes["broadcast"].append(sends.sender.num_sent_bytes - sum(num_bytes["broadcast"]))
        for parameter in policy.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    whole = num_bytes["whole"][0]
    return {
        "num_bytes": whole,
        "shares": {n: [each / whole for each in num_bytes[n][1:]] for n in DELTA_MEDIA},
        "seconds": {name: min(taken[1:]) for name, taken in seconds.items()},
    }


def print_speeds(found: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table(title="GB/s of float32 weights; in brackets without hashes; share of memcpy")
    columns = ("model", "MB", "memcpy", "hash", "medium", "publish", "load")
    for label in (*columns, "publish / memcpy", "load / memcpy"):
        table.add_column(label, justify="right")
    for model, of in found.items():
        speeds = of["gigabytes_per_s"]
        for medium in MEDIA:
            parts = [f"{medium}, {part}" for part in ("publish", "load")]
            table.add_row(
                model,
                f"{of['num_bytes'] / 1e6:.1f}",
                f"{speeds['memcpy']:.1f}",
                f"{speeds['hash']:.1f}",
                medium,
                *(f"{speeds[part]:.2f} ({speeds[f'{part} unhashed']:.2f})" for part in parts),
                *(
                    f"{speeds[part] / speeds['memcpy']:.2f} "
                    f"({speeds[f'{part} unhashed'] / speeds['memcpy']:.2f})"
                    for part in parts
                ),
            )
    Console(width=150).print(table)


def print_deltas(found: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table(title=f"bfloat16 at a rate of {DELTA_RATE:g}: bytes shipped, of all")
    steps = ("step 1", "step 2", f"step {NUM_DELTAS}")
    for label in ("model", "MB", "medium", *steps, "publish, s (whole)", "load, s (whole)"):
        table.add_column(label, justify="right")
    for model, of in found.items():
        costs = of["deltas"]
        taken, size = costs["seconds"], f"{costs['num_bytes'] / 1e6:.1f}"
        for medium, by_step in costs["shares"].items():
            shares = [f"{100 * by_step[step]:.2f}%" for step in (0, 1, -1)]
            seconds = [
                f"{taken[f'{medium}, {part}']:.3f} ({taken[f'whole, {part}']:.3f})"
                for part in ("publish", "load")
            ]
            table.add_row(model, size, medium, *shares, *seconds)
    Console(width=150).print(table)


def print_updates(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    table = Table(title="An update of the default job's engine, all slots decoding")
    for label in ("interruption", "medium", "transfer, ms", "stall, ms", "longest stall, ms"):
        table.add_column(label, justify="right")
    for interruption, by_medium in found.items():
        for medium, costs in by_medium.items():
            told = [f"{1000 * seconds:.1f}" for seconds in costs.values()]
            table.add_row(interruption, medium, *told)
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    speeds = {}
    with tempfile.TemporaryDirectory() as scratch:
        for model in arguments.models:
            directory = Path(scratch) / model
            policy = make_policy(model, directory / "model")
            speeds[model] = {
                **gigabytes_per_s(policy, directory),
                "deltas": deltas(policy, directory),
            }
        found = {"models": speeds, "updates": asyncio.run(updates(Path(scratch)))}
    print_speeds(speeds)
    print_deltas(speeds)
    print_updates(found["updates"])
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
