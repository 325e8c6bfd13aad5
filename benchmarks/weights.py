"""Cost of moving weights from the trainer to a generator, by medium, against a plain copy.

Random weights, one thread, media in turn. `memcpy` copies the tensors once. A float32 version is
staged, hashed beside that, and published; then it is mapped or read, hashed, and copied into the
policy: the best of nine. An engine of the default job, with all slots decoding, gets versions one
after the other: how long each was read, and how long the switch and the decode step after it took;
the median of nine. Last, the bytes that a directory ships of a bfloat16 version after a small step.

    python -m benchmarks.weights [--models default 11M 100M] [--json FILE]

Needs 9 GB of memory, 3 of them in /dev/shm.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from areal_flow.config import load_recipe
from areal_flow.core.types import GroupRequest, Sampling, as_tokens
from areal_flow.policy.models.hashing import hash_tensors
from areal_flow.policy.models.policy import assign_tensors, empty_policy, policy_tensors
from areal_flow.policy.settings import Medium
from areal_flow.policy.weights.channel import WeightsReader, WeightsWriter
from areal_flow.policy.weights.directory import DirectoryWriter
from areal_flow.policy.weights.shared_memory import ChosenChannel, free_segments
from areal_flow.rollout.engines.protocol import Engine
from areal_flow.rollout.engines.registry import engine_factory
from benchmarks import harness
from benchmarks.shapes import random_policy
from pipelines.tiny_jobs.tiny_policy import write_tiny_model

MEDIA: tuple[Medium, ...] = ("directory", "shared_memory")
MODELS = {"default": None, "11M": (8192, 320, 6), "100M": (16_384, 768, 10)}
"""Vocabulary, width and layers."""
RECIPE = harness.ROOT / "pipelines" / "recipes" / "arithmetic.toml"
NUM_WARM = 6
"""Versions before the measured ones: from then on shared memory has pages to write again."""
NUM_UPDATES, NUM_DELTAS, DELTA_RATE = 9, 12, 1e-6


def make_policy(name: str, directory: Path) -> Any:
    """Return a policy with random weights: the default one, or a Qwen2 of about this size."""
    if not (shape := MODELS[name]):
        write_tiny_model(directory, max_model_len=64)
        return empty_policy(directory)
    heads = shape[1] // 64
    return random_policy(*shape, heads=heads, key_value_heads=1, tie_word_embeddings=False)


def publish(channel: WeightsWriter, version: int, tensors: Mapping[str, Tensor]) -> None:
    channel.stage(version, tensors)
    channel.publish(version)


def load(channel: WeightsReader, policy: Any, version: int) -> None:
    assign_tensors(policy, channel.load(version))


def measure_speeds(name: str, policy: Any, directory: Path) -> list[dict[str, Any]]:
    """Return the speed of copying, hashing, publishing and loading a policy, in GB/s."""
    tensors = {name: tensor.clone() for name, tensor in policy_tensors(policy).items()}
    num_gb = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    channels = {medium: ChosenChannel(directory / medium, medium) for medium in MEDIA}
    ways: dict[str, Callable[[int], object]] = {
        "memcpy": lambda version: assign_tensors(policy, tensors),
        "hash": lambda version: hash_tensors(tensors),
    }
    for medium, channel in channels.items():
        ways[f"publish {medium}"] = partial(publish, channel, tensors=tensors)
        ways[f"load {medium}"] = partial(load, channel, policy)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    try:
        for version in range(NUM_WARM + NUM_UPDATES):
            for way, work in ways.items():
                seconds[way].append(harness.seconds_of(partial(work, version)))
    finally:
        for medium in MEDIA:
            free_segments(directory / medium)
    speeds = {way: num_gb / min(taken[NUM_WARM:]) for way, taken in seconds.items()}
    common = {"model": name, "mb": 1e3 * num_gb} | {way: speeds[way] for way in ("memcpy", "hash")}
    rows = []
    for medium in MEDIA:
        rates = {way: speeds[f"{way} {medium}"] for way in ("publish", "load")}
        shares = {f"{way}_by_memcpy": rate / speeds["memcpy"] for way, rate in rates.items()}
        rows.append({**common, "medium": medium, **rates, **shares})
    return rows


async def measure_updates(directory: Path) -> list[dict[str, Any]]:
    """Return the cost of updates for engines of the default recipe with full slots."""
    model = directory / "model"
    tensors = policy_tensors(make_policy("default", model))
    settings = load_recipe(RECIPE).generation
    rows = []
    for medium in MEDIA:
        channel = ChosenChannel(directory / medium, medium)
        publish(channel, 0, tensors)
        engine = await engine_factory(settings.engine)(model, settings, channel)
        try:
            rows.append({"medium": medium, **await update(engine, channel, tensors)})
        finally:
            engine.close()
            free_segments(channel.root)
    return rows


async def update(
    engine: Engine, channel: ChosenChannel, tensors: Mapping[str, Tensor]
) -> dict[str, float]:
    """Publish versions to a decoding engine; return the cost of the measured ones."""
    stop = asyncio.Event()
    decoding = asyncio.gather(*(keep_decoding(engine, group, stop) for group in range(8)))
    transfers, stalls = [], []
    for version in range(1, NUM_WARM + NUM_UPDATES):
        await asyncio.sleep(0.2)
        before_s = engine.stats().stall_s
        publish(channel, version, tensors)
        await engine.load_weights(version, channel)
        assert channel.last_load is not None
        transfers.append(1e3 * channel.last_load.transfer_s)
        stalls.append(1e3 * (engine.stats().stall_s - before_s))
    stop.set()
    await decoding
    stalls = stalls[NUM_WARM - 1 :]
    medians = {"transfer_ms": median(transfers[NUM_WARM - 1 :]), "stall_ms": median(stalls)}
    return {**medians, "longest_stall_ms": max(stalls)}


async def keep_decoding(engine: Engine, group: int, stop: asyncio.Event) -> None:
    """Keep decoding batches of 16 completions of 16 tokens."""
    prompt, sampling, seeds = as_tokens(range(2, 14)), Sampling(max_new_tokens=16), range(16)
    while not stop.is_set():
        await engine.generate(GroupRequest(f"{group}-{seeds[0]}", prompt, tuple(seeds), sampling))
        seeds = range(seeds.stop, seeds.stop + 16)


def measure_deltas(name: str, policy: Any, directory: Path) -> dict[str, Any]:
    """Return what a directory ships of AdamW's steps in bfloat16, as shares of all bytes.

    The gradients are noise. A first step moves every weight by the whole rate, the most that AdamW
    can; later ones by less, the less the gradients agree.
    """
    optimizer = torch.optim.AdamW(policy.parameters(), lr=DELTA_RATE, betas=(0.9, 0.95))
    root = directory / "deltas"
    writer = DirectoryWriter(root)
    num_bytes = []
    for version in range(NUM_DELTAS + 1):
        tensors = policy_tensors(policy).items()
        publish(writer, version, {n: tensor.to(torch.bfloat16) for n, tensor in tensors})
        files = (root / f"{version:08d}").iterdir()
        num_bytes.append(sum(file.stat().st_size for file in files))
        for parameter in policy.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    full_bytes = num_bytes[0]
    shares = {f"step_{step}": num_bytes[step] / full_bytes for step in (1, 2, NUM_DELTAS)}
    return {"model": name, "mb": full_bytes / 1e6, **shares}


def main() -> None:
    models = list(MODELS)
    chosen = harness.parse_options(__doc__, choices={"models": models}, models=models)
    torch.set_num_threads(1)
    speeds, deltas = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for name in chosen.models:
            directory = Path(scratch) / name
            policy = make_policy(name, directory / "model")
            speeds += measure_speeds(name, policy, directory)
            deltas.append(measure_deltas(name, policy, directory))
        updates = asyncio.run(measure_updates(Path(scratch) / "updates"))
    tables = {
        "GB/s of float32 weights": speeds,
        "An update of the default job's engine, all slots decoding": updates,
        f"bfloat16 at a rate of {DELTA_RATE:g}: bytes shipped, of all": deltas,
    }
    harness.report(chosen.json, tables)


if __name__ == "__main__":
    main()
