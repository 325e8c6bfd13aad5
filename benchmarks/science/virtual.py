"""Runs a flow in virtual time, with the project's own controller: what two pages share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import exp
from typing import Any

import numpy as np

from areal_flow.cluster.placement import max_running_trajectories
from areal_flow.cluster.settings import ClusterSettings
from areal_flow.config import Recipe, TrainerSettings
from areal_flow.controller.flow import Flow
from areal_flow.controller.flow_setup import FlowBackends, InitialState
from areal_flow.controller.gate import ControllerSettings
from areal_flow.controller.ledger_row import Provenance
from areal_flow.generation.protocol import GenerationSettings
from areal_flow.types import Prompt, as_tokens
from benchmarks.tailed_load import Lengths
from benchmarks.virtual_cluster import VirtualCluster

MEAN_TOKENS, CUT = 8_000, 65_536
"""Of completions: lognormal, the mean before the cut."""
PROMPT = Prompt("prompt", "a question", "its answer", 1, as_tokens([1]))


def recipe_of(num_generators: int, *, eta: int, seed: int, num_steps: int) -> Recipe:
    return Recipe(
        num_steps=num_steps,
        seed=seed,
        controller=ControllerSettings(batch_size=256, group_size=8, max_staleness=eta),
        generation=GenerationSettings(
            max_new_tokens=CUT, max_model_len=CUT + 1024, max_num_seqs=64
        ),
        trainer=TrainerSettings(tokens_per_micro_batch=CUT + 1024),
        cluster=ClusterSettings(num_generators=num_generators),
    )


def lengths_of(sigma: float) -> Callable[[int], int]:
    """Return how long the completion of a seed is."""
    lengths = Lengths(round(MEAN_TOKENS * exp(-(sigma**2) / 2)), sigma, CUT)
    return lambda seed: int(lengths.draw(np.random.default_rng(seed)))


async def run_flow(
    cluster: VirtualCluster, recipe: Recipe, schedule: Callable[[Flow], Awaitable[None]]
) -> list[float]:
    """Train; return when each step ended, in virtual seconds."""
    moments: list[float] = []

    async def on_step(row: dict[str, Any]) -> None:
        moments.append(asyncio.get_running_loop().time())

    flow = Flow(
        recipe,
        FlowBackends(cluster, cluster, cluster, cluster, lambda index: PROMPT, on_step),
        InitialState(),
        Provenance(1, recipe.digest(), "code"),
        max_running=max_running_trajectories(recipe, num_generators=recipe.cluster.num_generators),
    )
    try:
        await schedule(flow)
    finally:
        await flow.close()
    return moments
