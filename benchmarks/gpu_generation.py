"""An engine on a GPU, through its own interface: tokens per second, and the cost of new weights.

Random weights of Qwen2.5-1.5B's shapes, in the type that they are served in. Groups of random
prompts decode to their longest length, once to prepare and once for the rate. Then versions are
staged on the device, published, and loaded while all slots decode.

    python -m benchmarks.gpu_generation [--engine vllm] [--media auto directory] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor

from areal_flow.core.types import GroupRequest, Sampling, as_tokens
from areal_flow.policy.models.policy import policy_tensors
from areal_flow.policy.weights.shared_memory import ChosenChannel, free_segments
from areal_flow.rollout.engines.protocol import Engine, GenerationSettings, VLLMSettings
from areal_flow.rollout.engines.registry import engine_factory
from benchmarks import harness
from benchmarks.shapes import random_policy

PROMPT_TOKENS = 64


async def generate(engine: Engine, chosen: argparse.Namespace, turn: int) -> int:
    """Decode all groups; return the number of tokens."""
    drawn = np.random.default_rng(turn).integers(
        1, chosen.vocabulary, (chosen.groups, PROMPT_TOKENS)
    )
    seeds, sampling = tuple(range(chosen.members)), Sampling(chosen.tokens)
    requests = [
        GroupRequest(f"{turn}-{group}", as_tokens(prompt), seeds, sampling)
        for group, prompt in enumerate(drawn.tolist())
    ]
    completions = await asyncio.gather(*map(engine.generate, requests))
    return sum(len(completion.tokens) for group in completions for completion in group)


def settings_of(chosen: argparse.Namespace) -> GenerationSettings:
    has_gpu_of_vllm = (chosen.engine, chosen.device) == ("vllm", "cuda")
    return GenerationSettings(
        engine=chosen.engine,
        device=chosen.device,
        dtype=chosen.dtype,
        max_num_seqs=chosen.groups * chosen.members,
        max_new_tokens=chosen.tokens,
        max_model_len=PROMPT_TOKENS + chosen.tokens,
        vllm=VLLMSettings(gpu_memory_utilization=0.7) if has_gpu_of_vllm else VLLMSettings(),
    )


async def measure(
    model: Path, tensors: Mapping[str, Tensor], medium: Any, chosen: argparse.Namespace
) -> dict[str, Any]:
    settings = settings_of(chosen)
    channel = ChosenChannel(model.parent / medium, medium)
    channel.stage(0, tensors)
    channel.publish(0)
    began = perf_counter()
    engine = await engine_factory(chosen.engine)(model, settings, channel)
    start_s = perf_counter() - began
    try:
        await generate(engine, chosen, 0)
        began = perf_counter()
        rate = await generate(engine, chosen, 1) / (perf_counter() - began)
        swaps = await swap(engine, channel, tensors, chosen)
    finally:
        engine.close()
        free_segments(channel.root)
    row = {"engine": chosen.engine, "medium": medium, "start_s": start_s, "tokens_per_s": rate}
    return {**row, **swaps}


async def swap(
    engine: Engine, channel: ChosenChannel, tensors: Mapping[str, Tensor], chosen: Any
) -> dict[str, float]:
    """Load versions during decoding; return the medians, and the longest stall."""
    num_gb = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    published, loaded, stalls = [], [], []
    for version in range(1, chosen.updates + 1):
        running = asyncio.create_task(generate(engine, chosen, 1 + version))
        await asyncio.sleep(0.1)
        before_s, began = engine.stats().stall_s, perf_counter()
        channel.stage(version, tensors)
        channel.publish(version)
        published.append(num_gb / (perf_counter() - began))
        await engine.load_weights(version, channel)
        assert channel.last_load is not None
        loaded.append(num_gb / channel.last_load.transfer_s)
        stalls.append(1e3 * (engine.stats().stall_s - before_s))
        await running
    return {
        "publish_gb_per_s": median(published),
        "load_gb_per_s": median(loaded),
        "stall_ms": median(stalls),
        "longest_stall_ms": max(stalls),
    }


def main() -> None:
    numbers = {"groups": 32, "members": 8, "tokens": 512, "updates": 4}
    shape = {"hidden": 1536, "layers": 28, "vocabulary": 151_936}
    names = {"engine": "vllm", "device": "cuda", "dtype": "bfloat16", "media": ["auto"]}
    chosen = harness.parse_options(__doc__, **numbers, **shape, **names)
    title = f"Generation, {chosen.layers} layers of width {chosen.hidden}"
    if chosen.engine == "vllm" and not find_spec("vllm"):
        row = {"engine": "vllm", "skipped": "it is not installed: pip install '.[vllm]'"}
        harness.report(chosen.json, {title: [row]})
        return
    logging.basicConfig(format="%(message)s")
    logging.getLogger("areal_flow").setLevel(logging.INFO)  # the parts of each pause
    heads = max(1, chosen.hidden // 128)
    sizes = (chosen.vocabulary, chosen.hidden, chosen.layers)
    place = {"device": chosen.device, "dtype": chosen.dtype}
    policy = random_policy(*sizes, heads=heads, key_value_heads=max(1, heads // 6), **place)
    with TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        policy.config.save_pretrained(model)
        tensors = policy_tensors(policy)
        rows = [asyncio.run(measure(model, tensors, medium, chosen)) for medium in chosen.media]
    harness.report(chosen.json, {title: rows})


if __name__ == "__main__":
    main()
