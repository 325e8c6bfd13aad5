"""What hundreds of generators cost the driver: processor seconds of a step, weights, memory.

`areal-flow train` itself, with the default job's prompts and policy, real scoring, a real log and a
real trainer. Only the generators have no engine: all are Dask workers of one other process, whose
groups cost nothing, so that the driver's processor time (the scheduler included) is its own. They
listen at an address for every eight, as on as many hosts, and load every version of the weights.
The first steps are left out. Memory is shown after each tenth of a longer run of small batches.

    python -m benchmarks.fleet [--generators 64 512] [--steps 8] [--batch-size 8192] [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, NamedTuple
from unittest.mock import patch

import dask
import numpy as np
import psutil

import areal_flow
import pipelines
from areal_flow.cluster import worker
from areal_flow.cluster.generators import DaskWeights
from areal_flow.cluster.launchers import LAUNCHERS
from areal_flow.cluster.launchers.local import LocalLauncher
from areal_flow.cluster.liveness import ProcessorUse
from areal_flow.cluster.placement import PROCESS_ENVIRONMENT, WorkerPlacement
from areal_flow.cluster.pool import WorkerPool
from areal_flow.config import load_recipe
from areal_flow.core.machine import return_freed_memory
from areal_flow.core.types import (
    Completion,
    EngineStats,
    GroupRequest,
    Tokens,
    VersionSpan,
    as_tokens,
)
from areal_flow.log.run_log import RunLog
from areal_flow.policy.weights.channel import WeightsReader
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.rollout.engines.registry import ENGINES
from benchmarks import harness

FLEET = "fleet"
"""The name of the launcher, and of the engine."""
RECIPE = Path(pipelines.__path__[0]) / "recipes" / "arithmetic.toml"
NUM_TOKENS = 8
WORKERS_PER_HOST = 8
NUM_REWARD_WORKERS = 4
SERVE = "from benchmarks.fleet import serve; serve()"
TIMED = (
    (WorkerPool, "start_until_joined"),
    (RunLog, "commit"),
    (DaskWeights, "publish"),
    (DaskWeights, "load_everywhere"),
)


class NoEngine:
    """An `Engine` that completes each prompt at once; it loads weights, and drops them."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.broken = False

    async def generate(self, request: GroupRequest) -> list[Completion]:
        tokens: Tokens = as_tokens(request.prompt_tokens[:1].repeat(NUM_TOKENS))
        logprobs = np.full(NUM_TOKENS, -1, np.float32)
        spans = (VersionSpan(self.version, NUM_TOKENS),)
        return [Completion(tokens, logprobs, spans, "length") for _ in request.seeds]

    async def load_weights(self, version: int, reader: WeightsReader) -> None:
        await asyncio.to_thread(reader.load, version)
        self.version = version

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats()

    def occupancy(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


async def start_no_engine(
    model: Path, settings: GenerationSettings, reader: WeightsReader
) -> NoEngine:
    engine = NoEngine(reader.newest())
    await engine.load_weights(engine.version, reader)
    return engine


class FleetLauncher(LocalLauncher):
    """Generators in one process that all share; trainer and reward workers in their own."""

    _fleet: Process | None = None
    _starting = asyncio.Lock()

    async def start(self, placement: WorkerPlacement, on_exit: Callable[[str], None]) -> None:
        if placement.role != "generator":
            await super().start(placement, on_exit)
            return
        async with self._starting:
            if self._fleet is None:
                self._fleet = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", SERVE),
                    stdin=PIPE,
                    env=harness.environment(**PROCESS_ENVIRONMENT),
                )
        options = worker.worker_options(placement, self._scheduler, self._network)
        assert self._fleet.stdin is not None
        self._fleet.stdin.write(f"{options}\n".encode())

    def processor_use(self, name: str) -> ProcessorUse:
        """Return what a supervisor would report; else a busy fleet would count as hanging."""
        return ProcessorUse(perf_counter())

    async def stop(self, name: str) -> None:
        await super().stop(name)
        if self._fleet is not None and self._fleet.stdin is not None:
            self._fleet.stdin.close()


def serve() -> None:
    """Run a worker for each line of the standard input, until it ends."""
    with installed():
        asyncio.run(_serve())


async def _serve() -> None:
    loop, lines = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    starts: list[asyncio.Future[Any]] = []
    # Otherwise every worker counts the descriptors of all of them, twice a second.
    once_an_hour = {"distributed.admin.system-monitor.interval": "1h"}
    with dask.config.set(worker.DASK_SETTINGS | once_an_hour):
        while line := await lines.readline():
            address = f"127.0.1.{1 + len(starts) // WORKERS_PER_HOST}"
            with patch.object(worker, "get_ip", return_value=address):
                started = worker.make_worker(**json.loads(line))
            starts.append(asyncio.ensure_future(started))
    psutil.Process().kill()  # it has nothing to finish


@contextmanager
def installed() -> Iterator[None]:
    """Let recipes name the launcher and the engine, in this process."""
    engine = f"{__name__}:start_no_engine"
    with patch.dict(LAUNCHERS, {FLEET: FleetLauncher}), patch.dict(ENGINES, {FLEET: engine}):
        yield


class Spent(NamedTuple):
    """Seconds of one call."""

    seconds: float
    processor_s: float
    """Of the whole process, whatever else it did meanwhile."""


@contextmanager
def timed(kind: type, name: str, spent: dict[str, list[Spent]]) -> Iterator[None]:
    """Note what each call of an async method takes."""
    method = getattr(kind, name)

    async def measured(*arguments: Any, **options: Any) -> Any:
        began = perf_counter(), process_time()
        result = await method(*arguments, **options)
        spent[name].append(Spent(perf_counter() - began[0], process_time() - began[1]))
        return result

    with patch.object(kind, name, measured):
        yield


class Sample(NamedTuple):
    """The driver after a step."""

    at: float
    processor_s: float
    memory_mb: float
    num_files: int


def drive(
    runs: Path, num_skipped: int, settings: dict[str, Any]
) -> tuple[dict[str, float], list[float]]:
    """Train with these settings, in a process that does nothing else.

    Returns:
        What it took, and the driver's memory after each step, in MB.
    """
    return_freed_memory()  # as the command does
    driver, samples = psutil.Process(), list[Sample]()
    spent = defaultdict[str, list[Spent]](list)

    def sample(_: dict[str, Any]) -> None:
        memory_mb = driver.memory_info().rss / 1e6
        samples.append(Sample(perf_counter(), process_time(), memory_mb, driver.num_fds()))

    with ExitStack() as patches:
        patches.enter_context(installed())
        for kind, name in TIMED:
            patches.enter_context(timed(kind, name, spent))
        areal_flow.train(load_recipe(RECIPE, settings), runs=runs, on_step=sample)
    (admission,) = spent["start_until_joined"]
    first, last = samples[num_skipped - 1], samples[-1]
    num_steps, num_generators = len(samples) - num_skipped, settings["cluster"]["num_generators"]

    def seconds(name: str) -> float:
        return median(call.seconds for call in spent[name])

    return {
        "generators": num_generators,
        "join_s": admission.seconds,
        "join_driver_s": admission.processor_s,
        "files": last.num_files,
        "commit_ms": 1e3 * seconds("commit"),
        "publish_ms": 1e3 * seconds("publish"),
        "acknowledge_s": seconds("load_everywhere"),
        "step_s": (last.at - first.at) / num_steps,
        "driver_s": (last.processor_s - first.processor_s) / num_steps,
    }, [sample.memory_mb for sample in samples]


def settings_of(
    num_generators: int, *, steps: int, batch_size: int, group_size: int
) -> dict[str, Any]:
    return {
        "num_steps": steps,
        "sft": {"num_steps": 0},
        "prompts": {"num_held_out": 0},
        "tracking": {"enabled": False},
        "generation": {"engine": FLEET, "max_new_tokens": NUM_TOKENS},
        "controller": {"batch_size": batch_size, "group_size": group_size},
        "algorithm": {"num_minibatches": min(2, batch_size // group_size)},
        "trainer": {"learning_rate": 1e-6},
        "cluster": {
            "launcher": FLEET,
            "num_generators": num_generators,
            "num_reward_workers": NUM_REWARD_WORKERS,
        },
    }


def measure(
    num_generators: int, num_skipped: int, **sizes: int
) -> tuple[dict[str, float], list[float]]:
    """Return what `drive` returns, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="areal-flow-bench-") as scratch:
        call = Path(scratch), num_skipped, settings_of(num_generators, **sizes)
        as_the_command_does = {"MALLOC_ARENA_MAX": "2"}  # before its imports start threads
        (measured,) = harness.in_processes(drive, [call], as_the_command_does)
    return measured


def main(arguments: Sequence[str] | None = None) -> None:
    sizes = {"batch_size": 8192, "group_size": 16}
    longer = {"long_steps": 1000, "long_batch_size": 256}
    numbers: Any = {"generators": [64, 512], "steps": 8, "skip": 3}
    chosen = harness.parse_options(__doc__, arguments, **numbers, **sizes, **longer)
    rows = [
        measure(
            num_generators,
            chosen.skip,
            steps=chosen.steps,
            batch_size=chosen.batch_size,
            group_size=chosen.group_size,
        )[0]
        for num_generators in chosen.generators
    ]
    title = f"Batches of {chosen.batch_size:,} in groups of {chosen.group_size}"
    tables: dict[str, list[dict[str, float]]] = {title: rows}
    if chosen.long_steps:
        row, memory_mb = measure(
            max(chosen.generators),
            chosen.skip,
            steps=chosen.long_steps,
            batch_size=chosen.long_batch_size,
            group_size=chosen.group_size,
        )
        after = [-(-len(memory_mb) * tenth // 10) for tenth in range(1, 11)]
        tables[f"Batches of {chosen.long_batch_size:,}, {row['generators']} generators"] = [
            {"steps": steps, "driver_memory_mb": memory_mb[steps - 1]} for steps in after
        ]
    harness.report(chosen.json, tables)


if __name__ == "__main__":
    main()
