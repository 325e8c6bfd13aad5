"""Async against sync at 8 to 512 generators, in virtual time: the controller as it is.

`virtual_cluster` says what a generator and a trainer's GPU take; the rates and the lengths below
are assumed, a batch, its groups, the longest completion, staleness and the share of GPUs that
generate are the paper's (arXiv 2505.24298). Three of four GPUs generate in async; in sync all
of them generate, and then all of them train. Both schedules have the same GPUs, and the same
lengths by seed.

A bound is what no schedule of its kind can do without: async the larger, sync the sum of
T_gen, all tokens at the rate of full generators (and sync no less than its longest completion,
alone on a GPU), and T_train.

    python -m benchmarks.scaling [--generators 8 64 128 512] [--steps 40] [--skip 20]
                                 [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

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
from benchmarks.plots import draw_scaling
from benchmarks.tailed_load import Lengths
from benchmarks.virtual_cluster import Costs, VirtualCluster
from tests.unit.virtual_time import run_in_virtual_time

LENGTHS = Lengths(median=5_500, sigma=1.0, cut=27_648)
"""8,104 tokens in the mean; 5% are cut."""
MAX_ROWS = 256
COSTS = Costs()
BATCH = ControllerSettings(batch_size=8192, group_size=16, max_staleness=8)
GENERATION = GenerationSettings(
    max_new_tokens=LENGTHS.cut, max_model_len=LENGTHS.cut + 1024, max_num_seqs=MAX_ROWS
)
GENERATORS_PER_TRAINER = 3
SCHEDULES = {"async": run_async_schedule, "sync": run_barrier_schedule}
PROMPT = Prompt("prompt", "a question", "its answer", 1, as_tokens([1]))


@dataclass(frozen=True)
class Measurement:
    """Means over the measured steps of one schedule; seconds are virtual, and of one step."""

    schedule: str
    num_generators: int
    num_trainers: int
    seconds_step: float
    bound_s: float
    seconds_generate: float
    seconds_train: float
    num_trained_tokens: float
    masked_fraction: float
    staleness_mean: float

    @property
    def tokens_per_second_trained(self) -> float:
        return self.num_trained_tokens / self.seconds_step


def completion_tokens(seed: int) -> int:
    return int(LENGTHS.draw(np.random.default_rng(seed)))


def recipe_of(num_generators: int, num_steps: int) -> Recipe:
    return Recipe(
        num_steps=num_steps,
        controller=BATCH,
        generation=GENERATION,
        algorithm=DecoupledPPO(num_minibatches=4),
        trainer=TrainerSettings(tokens_per_micro_batch=GENERATION.max_model_len),
        cluster=ClusterSettings(num_generators=num_generators),
    )


async def run_schedule(
    schedule: str, recipe: Recipe, *, num_trainers: int
) -> list[dict[str, float]]:
    """Return the ledger's rows, each with the virtual time at which its weights were published."""
    rows: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()

    async def on_step(row: dict[str, Any]) -> None:
        rows.append(row | {"at": loop.time()})

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


def measure(schedule: str, num_generators: int, *, num_steps: int, num_skipped: int) -> Measurement:
    num_trainers = round(num_generators / GENERATORS_PER_TRAINER)
    if schedule == "sync":
        num_generators = num_trainers = num_generators + num_trainers
    recipe = recipe_of(num_generators, num_steps)
    rows = run_in_virtual_time(run_schedule(schedule, recipe, num_trainers=num_trainers))
    measured = rows[num_skipped:]
    trained = mean(row["num_trained_tokens"] for row in measured)
    masked = mean(row["num_masked_tokens"] for row in measured)
    seconds_generate = (trained + masked) / (num_generators * COSTS.decode_tokens_per_s(MAX_ROWS))
    seconds_train = mean(row["seconds_train"] for row in measured)
    alone = LENGTHS.cut / COSTS.decode_tokens_per_s(1)
    bounds = {
        "async": max(seconds_generate, seconds_train),
        "sync": max(seconds_generate, alone) + seconds_train,
    }
    return Measurement(
        schedule=schedule,
        num_generators=num_generators,
        num_trainers=num_trainers,
        seconds_step=(rows[-1]["at"] - rows[num_skipped - 1]["at"]) / len(measured),
        bound_s=bounds[schedule],
        seconds_generate=seconds_generate,
        seconds_train=seconds_train,
        num_trained_tokens=trained,
        masked_fraction=masked / (trained + masked),
        staleness_mean=mean(row["staleness_mean"] for row in measured),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generators", type=int, nargs="+", default=[8, 64, 128, 512])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skip", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    steps = {"num_steps": arguments.steps, "num_skipped": arguments.skip}
    found = [
        {schedule: measure(schedule, num_generators, **steps) for schedule in SCHEDULES}
        for num_generators in arguments.generators
    ]
    print_table(found)
    report = {
        "costs": asdict(COSTS),
        "lengths": asdict(LENGTHS),
        "sizes": [
            {schedule: asdict(one) for schedule, one in pair.items()} | {"speedup": speedup(pair)}
            for pair in found
        ],
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.plot:
        draw_scaling(report, arguments.plot)


def speedup(pair: dict[str, Measurement]) -> float:
    """Return how many more tokens async trains in a second."""
    return pair["async"].tokens_per_second_trained / pair["sync"].tokens_per_second_trained


def print_table(found: Sequence[dict[str, Measurement]]) -> None:
    labels = ("generators", "trainers", "s/step", "bound", "T_gen", "T_train", "staleness")
    table = Table("schedule", *labels, "masked", "trained tok/s", "async over sync")
    for pair in found:
        for schedule, one in pair.items():
            seconds = (one.seconds_step, one.bound_s, one.seconds_generate, one.seconds_train)
            table.add_row(
                schedule,
                *(str(number) for number in (one.num_generators, one.num_trainers)),
                *(f"{value:.1f}" for value in (*seconds, one.staleness_mean)),
                f"{one.masked_fraction:.1%}",
                f"{one.tokens_per_second_trained:,.0f}",
                f"{speedup(pair):.2f}" if schedule == "async" else "",
            )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
