"""Async against sync at 8 to 512 generators, in virtual time: the controller as it is.

Rates (`virtual_cluster.Costs`) and lengths are assumed; batch, groups, the longest completion,
staleness and the share of GPUs that generate are the paper's (arXiv 2505.24298): three of four in
async; in sync all generate, and then all train. Both schedules have the same GPUs and lengths.
`generate_s` is all tokens at the rate of full generators. The bound of async is the larger of it
and `train_s`, of sync their sum; sync cannot generate faster than its longest completion alone.

    python -m benchmarks.scaling [--generators 8 64 128 512] [--json FILE]
"""

from __future__ import annotations

import asyncio
from statistics import mean
from typing import Any

import numpy as np

from areal_flow.algorithms.clipped import DecoupledPPO
from areal_flow.cluster.placement import max_running_trajectories
from areal_flow.cluster.settings import ClusterSettings
from areal_flow.config import Recipe, TrainerSettings
from areal_flow.controller.flow import Flow
from areal_flow.controller.flow_setup import FlowBackends, InitialState
from areal_flow.controller.gate import ControllerSettings
from areal_flow.controller.ledger_row import Provenance
from areal_flow.controller.schedules import run_async_schedule, run_barrier_schedule
from areal_flow.generation.protocol import GenerationSettings
from areal_flow.types import Prompt, as_tokens
from benchmarks import harness
from benchmarks.tailed_load import Lengths
from benchmarks.virtual_cluster import Costs, VirtualCluster
from tests.unit.virtual_time import run_in_virtual_time

LENGTHS = Lengths(median=5_500, sigma=1.0, cut=27_648)
"""8,104 tokens in the mean; 5% are cut."""
MAX_ROWS, GENERATORS_PER_TRAINER = 256, 3
COSTS = Costs()
GENERATION = GenerationSettings(
    max_new_tokens=LENGTHS.cut, max_model_len=LENGTHS.cut + 1024, max_num_seqs=MAX_ROWS
)
SCHEDULES = {"async": run_async_schedule, "sync": run_barrier_schedule}
PROMPT = Prompt("prompt", "a question", "its answer", 1, as_tokens([1]))


def recipe_of(num_generators: int, num_steps: int) -> Recipe:
    return Recipe(
        num_steps=num_steps,
        controller=ControllerSettings(batch_size=8192, group_size=16, max_staleness=8),
        generation=GENERATION,
        algorithm=DecoupledPPO(num_minibatches=4),
        trainer=TrainerSettings(tokens_per_micro_batch=GENERATION.max_model_len),
        cluster=ClusterSettings(num_generators=num_generators),
    )


async def run_schedule(schedule: str, recipe: Recipe, num_trainers: int) -> list[dict[str, Any]]:
    """Return the ledger's rows, each with the virtual time at which its weights were published."""
    rows: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()

    async def on_step(row: dict[str, Any]) -> None:
        rows.append(row | {"at": loop.time()})

    def completion_tokens(seed: int) -> int:
        return int(LENGTHS.draw(np.random.default_rng(seed)))

    cluster = VirtualCluster(recipe, COSTS, completion_tokens, num_trainers=num_trainers)
    flow = Flow(
        recipe,
        FlowBackends(cluster, cluster, cluster, cluster, lambda index: PROMPT, on_step),
        InitialState(),
        Provenance(1, recipe.digest(), "code"),
        max_running=max_running_trajectories(recipe, num_generators=recipe.cluster.num_generators),
    )
    try:
        await SCHEDULES[schedule](flow)
    finally:
        await flow.close()
    return rows


def measure(schedule: str, num_generators: int, num_steps: int, num_skipped: int) -> dict[str, Any]:
    """Return means over the measured steps; seconds are virtual, and of one step."""
    num_trainers = round(num_generators / GENERATORS_PER_TRAINER)
    if schedule == "sync":
        num_generators = num_trainers = num_generators + num_trainers
    recipe = recipe_of(num_generators, num_steps)
    rows = run_in_virtual_time(run_schedule(schedule, recipe, num_trainers))
    measured = rows[num_skipped:]
    trained = mean(row["num_trained_tokens"] for row in measured)
    masked = mean(row["num_masked_tokens"] for row in measured)
    step_s = (rows[-1]["at"] - rows[num_skipped - 1]["at"]) / len(measured)
    generate_s = (trained + masked) / (num_generators * COSTS.decode_tokens_per_s(MAX_ROWS))
    train_s = mean(row["seconds_train"] for row in measured)
    alone_s = LENGTHS.cut / COSTS.decode_tokens_per_s(1)
    bounds = {"async": max(generate_s, train_s), "sync": max(generate_s, alone_s) + train_s}
    return {
        "schedule": schedule,
        "generators": num_generators,
        "trainers": num_trainers,
        "step_s": step_s,
        "bound_s": bounds[schedule],
        "generate_s": generate_s,
        "train_s": train_s,
        "staleness": mean(row["staleness_mean"] for row in measured),
        "masked_fraction": masked / (trained + masked),
        "trained_tokens_per_s": trained / step_s,
    }


def main() -> None:
    numbers = {"generators": [8, 64, 128, 512], "steps": 40, "skip": 20}
    chosen = harness.parse_options(__doc__, **numbers)
    rows = []
    for num_generators in chosen.generators:
        pair = [measure(name, num_generators, chosen.steps, chosen.skip) for name in SCHEDULES]
        of_sync = pair[1]["trained_tokens_per_s"]
        rows += [{**row, "over_sync": row["trained_tokens_per_s"] / of_sync} for row in pair]
    harness.report(chosen.json, {"A step in virtual time": rows})


if __name__ == "__main__":
    main()
