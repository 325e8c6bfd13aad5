"""How many groups one driver feeds: groups a second, its share of a core, its memory.

The driver is a run's own, in one process: Dask's scheduler and client, pool, health monitor, flow,
gate, buffer, committer and ledger over real Lance datasets, progress and tracking. A batch has the
paper's size (512 groups of 16, arXiv 2505.24298), a trainer takes no time, and generators sleep as
long as it takes for all of them together to offer `--offered` groups a second. See `crowd` for
where they sleep, and for what is real of `everything` and of `driver`.

    python benchmarks/fan_out.py [--generators 8 64 512] [--kinds driver everything]
                                 [--offered 400] [--seconds 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import monotonic, thread_time
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from areal_flow.cluster import pool
from areal_flow.cluster.adapters import DaskRollouts, DaskWeights
from areal_flow.cluster.launch import RunningCluster, launch_cluster
from areal_flow.cluster.placement import (
    groups_in_flight,
    max_running_trajectories,
    place_workers,
)
from areal_flow.cluster.worker_context import WorkerContext
from areal_flow.config import Recipe, build_recipe
from areal_flow.controller.flow import Flow
from areal_flow.controller.flow_setup import FlowBackends, InitialState
from areal_flow.controller.records import Provenance, genesis_row
from areal_flow.controller.schedules import run_async_schedule
from areal_flow.evaluation.pass_rates import PASS_RATE
from areal_flow.prompts.table import PromptTable
from areal_flow.run.directory import create_run, hold_run
from areal_flow.run.inputs import read_inputs
from areal_flow.run.layout import RunLayout
from areal_flow.run.lease import Writer
from areal_flow.step_metrics import NOTHING_TRAINED
from areal_flow.store.committed import CommittedLogs
from areal_flow.store.ledger import Ledger
from areal_flow.store.trajectories import TrajectoryCommitter
from areal_flow.tracking.registry import start_tracking
from areal_flow.types import PolicyHashes, StepRequest, StepResult
from areal_flow.weights.directory import DirectoryWriter
from benchmarks.crowd import MAX_PROCESSES, NUM_TOKENS, Crowd, register
from pipelines.console.progress import Progress
from pipelines.jobs.train import prepare_run

BATCH = {"batch_size": 8192, "group_size": 16, "max_staleness": 2}
WARM_UP_S = 20.0
MEAN_TOKENS = 8192
TOKENS_PER_GPU_S = {"1.5B": 10_000, "32B": 1_000}
"""Assumed for answers that may be 27,648 tokens long: their mean, and what one GPU generates."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What was used and done up to a moment."""

    at: float
    driver_s: float
    event_loop_s: float
    generator_s: float
    reward_s: float
    num_groups: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """Rates of one cluster. Shares are of one core; milliseconds are the driver's processor's."""

    kind: str
    generators: int
    processes: int
    groups_per_s: float
    driver_share: float
    event_loop_share: float
    driver_ms_per_group: float
    driver_mb: float
    generators_share: float
    reward_workers_share: float
    num_steps: int


class FakeTrainer:
    """Counts what it is asked to train, and stages weights that nobody reads."""

    def __init__(self, weights: Path) -> None:
        self._weights = weights

    async def step(self, request: StepRequest) -> StepResult:
        self.stage(request.step)
        metrics = replace(
            NOTHING_TRAINED,
            num_trained_tokens=NUM_TOKENS * len(request.trajectory_ids),
            metrics={PASS_RATE: 0.5},
        )
        return StepResult(request.step, PolicyHashes(f"w{request.step}", "s"), metrics, "{}")

    async def read_ahead(self, trajectory_ids: Sequence[str]) -> None: ...

    def stage(self, version: int) -> None:
        staged = self._weights / f".staged-{version:08d}"
        staged.mkdir(parents=True)
        (staged / "hash").write_text(str(version))


def fan_out_recipe(num_generators: int) -> Recipe:
    given = {
        "num_steps": 1_000_000,
        "prompts": {"num_prompts": 512, "num_held_out": 0},
        "controller": BATCH,
        "generation": {"engine": "sleeping"},
        "cluster": {
            "num_generators": num_generators,
            "num_reward_workers": 2,
            "launcher": "crowd",
        },
    }
    return build_recipe(given, source="benchmarks/fan_out.py")


class Driver:
    """A run's driver with a fake trainer."""

    def __init__(
        self, layout: RunLayout, recipe: Recipe, writer: Writer, cluster: RunningCluster
    ) -> None:
        weights = layout.weights_of(writer.writer_epoch)
        channel = DirectoryWriter(weights)
        trainer = FakeTrainer(weights)
        trainer.stage(0)
        channel.publish(0)
        prompts = PromptTable(layout.train_prompts, seed=recipe.seed)
        ledger = Ledger(layout.steps, writer)
        verifier = read_inputs(layout).verifier
        provenance = Provenance(writer.writer_epoch, recipe.digest(), "code", verifier)
        genesis = genesis_row(
            PolicyHashes("w0", "s"), provenance=provenance, numeric_environment="{}"
        )
        ledger.append(genesis)
        self._logs = CommittedLogs(TrajectoryCommitter(layout.trajectories, writer), ledger)
        num_generators = recipe.cluster.num_generators
        self._tracking = start_tracking(layout, recipe)
        self._log = (layout.root / "progress.log").open("w")
        console = Console(file=self._log)
        self._progress = Progress(recipe.num_steps, num_generators, console=console)
        self.flow = Flow(
            recipe,
            FlowBackends(
                DaskRollouts(cluster.client, channel, cluster.pool),
                self._logs,
                trainer,
                DaskWeights(cluster.client, channel, cluster.pool),
                prompts.prompt_at,
                self._on_step,
            ),
            InitialState(weights_hash="w0"),
            provenance,
            max_running=max_running_trajectories(recipe, num_generators=num_generators),
        )

    async def _on_step(self, row: dict[str, Any]) -> None:
        self._progress.step(row)
        self._tracking.wake()

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Train in the block."""
        self._tracking.wake()  # before the first step: it imports its client
        working = asyncio.create_task(run_async_schedule(self.flow))
        try:
            yield
            if working.done():
                working.result()
        finally:
            self.flow.request_stop()
            await working
            await self.flow.close()
            await self._logs.close()
            await asyncio.to_thread(self._tracking.close, "FINISHED")
            self._log.close()

    def usage(self, crowd: Crowd) -> Usage:
        used = getrusage(RUSAGE_SELF)
        num_group_tokens = NUM_TOKENS * BATCH["group_size"]
        return Usage(
            monotonic(),
            used.ru_utime + used.ru_stime,
            thread_time(),
            crowd.processor_s("generator"),
            crowd.processor_s("reward"),
            self.flow.accounting.committed // num_group_tokens,
            self.flow.policy_version,
        )


def measure(kind: str, num_generators: int, *, offered: float, seconds: float) -> Measurement:
    """Measure one cluster, in a process of its own: memory of another one would count."""
    with tempfile.TemporaryDirectory(prefix="areal-flow-fan-out-") as scratch:
        root = Path(scratch) / "runs" / "run"
        return asyncio.run(_measure(root, kind, num_generators, offered, seconds))


async def _measure(
    root: Path, kind: str, num_generators: int, offered: float, seconds: float
) -> Measurement:
    layout, recipe = RunLayout(root), fan_out_recipe(num_generators)
    # As many groups as can be asleep at a time, each for so long that together they end in time.
    num_running = min(groups_in_flight(recipe) * num_generators, recipe.groups_per_step)
    crowd = Crowd(kind, num_running / offered)
    register(crowd)
    pool.START_TIMEOUT_S = 600.0  # 512 workers on two cores
    create_run(layout, recipe)
    prepare_run(layout, recipe)
    workers = [worker for worker in place_workers(recipe) if worker.role != "trainer"]
    with hold_run(layout) as writer:
        context = WorkerContext(layout.root, writer.writer_epoch)
        async with launch_cluster(workers, recipe.cluster, context) as cluster:
            driver = Driver(layout, recipe, writer, cluster)
            async with driver.working():
                await asyncio.sleep(WARM_UP_S)
                first = driver.usage(crowd)
                await asyncio.sleep(seconds)
                last = driver.usage(crowd)
                driver_mb = psutil.Process().memory_info().rss / 1e6
    wall_s = last.at - first.at
    num_groups = last.num_groups - first.num_groups
    driver_s = last.driver_s - first.driver_s
    return Measurement(
        kind,
        num_generators,
        min(MAX_PROCESSES, num_generators),
        groups_per_s=num_groups / wall_s,
        driver_share=driver_s / wall_s,
        event_loop_share=(last.event_loop_s - first.event_loop_s) / wall_s,
        driver_ms_per_group=1e3 * driver_s / max(1, num_groups),
        driver_mb=driver_mb,
        generators_share=(last.generator_s - first.generator_s) / wall_s,
        reward_workers_share=(last.reward_s - first.reward_s) / wall_s,
        num_steps=last.num_steps - first.num_steps,
    )


def print_report(measurements: list[Measurement]) -> None:
    table = Table(box=None)
    for field in fields(Measurement):
        table.add_column(field.name, justify="right")
    for measured in measurements:
        cells = asdict(measured).values()
        table.add_row(*(f"{c:,.2f}" if isinstance(c, float) else str(c) for c in cells))
    Console(width=200).print(table)
    fastest = max(measured.groups_per_s for measured in measurements)
    tokens_per_s = fastest * BATCH["group_size"] * MEAN_TOKENS
    for model, tokens_per_gpu_s in TOKENS_PER_GPU_S.items():
        print(
            f"{fastest:.0f} groups/s, of {MEAN_TOKENS:,} tokens an answer, is what "
            f"{tokens_per_s / tokens_per_gpu_s:,.0f} GPUs generate at {tokens_per_gpu_s:,} "
            f"tokens/s each ({model})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generators", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--kinds", nargs="+", default=["driver", "everything"])
    parser.add_argument("--offered", type=float, default=400.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    measurements = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for kind, num_generators in product(arguments.kinds, arguments.generators):
            options = {"offered": arguments.offered, "seconds": arguments.seconds}
            measurements.append(processes.submit(measure, kind, num_generators, **options).result())
            print(measurements[-1], flush=True)
    print_report(measurements)
    if arguments.json:
        arguments.json.write_text(json.dumps([*map(asdict, measurements)], indent=2) + "\n")


if __name__ == "__main__":
    main()
