"""Many workers in few processes: what one driver has to do for them is what it does for real ones.

Each is a Dask worker as a run's are, with a name, slots, threads, heartbeats, connections and a
context of its own. They share processes, and a generator sleeps instead of decoding. What else is
left out depends on the kind of crowd:

    everything   nothing: rows, scores, fragments and receipts are made as always
    driver       reward workers pass on receipts: groups that are written together are a fragment
                 that was written once, for each number of groups, and is committed again and again
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Worker

from areal_flow.cluster import generator_tasks, launchers, reward_tasks
from areal_flow.cluster.health import processor_s
from areal_flow.cluster.launchers.child import Child, start_process
from areal_flow.cluster.launchers.standby import StandbyWorkers
from areal_flow.cluster.placement import WorkerPlacement
from areal_flow.cluster.settings import ClusterSettings
from areal_flow.cluster.worker_context import worker_context
from areal_flow.cluster.worker_process import DASK_SETTINGS, end_with_parent
from areal_flow.controller.records import group_seeds
from areal_flow.generation import registry
from areal_flow.generation.protocol import GenerationSettings
from areal_flow.store.codec import rollout_table, scored_table
from areal_flow.store.trajectories import write_groups
from areal_flow.types import (
    Completion,
    EngineStats,
    Episode,
    GroupReceipt,
    GroupRequest,
    Prompt,
    Score,
    TrajectoryReceipt,
    VersionSpan,
    as_tokens,
    trajectory_id,
)
from areal_flow.weights.channel import WeightsReader
from areal_flow.workflows.group import RolledOutGroup
from areal_flow.workflows.protocol import TrajectoryDraft

NUM_TOKENS = 8
"""Of each completion: small ones cost a driver the most."""
PROMPT = Prompt("prompt", "1 + 1 =", "2", 1, as_tokens([1, 2, 3]))
MAX_PROCESSES = 8

_randomness = random.Random(0)
_pause_s = 0.0


@dataclass(frozen=True, slots=True)
class Crowd:
    """What one crowd does, and its processes by name: those of a role begin with it."""

    kind: str
    pause_s: float
    """How long a group takes, on average."""
    processes: dict[str, Child] = field(default_factory=dict)

    def processor_s(self, role: str) -> float:
        """Return the processor time that the workers of a role have used so far."""
        of_role = [child for name, child in self.processes.items() if name.startswith(role)]
        return sum(processor_s(child.process.pid) or 0.0 for child in of_role)


class CrowdLauncher:
    """Has workers started by a few processes in turn; reward workers by one of their own."""

    def __init__(
        self, crowd: Crowd, scheduler: str, settings: ClusterSettings, _: StandbyWorkers
    ) -> None:
        self._crowd = crowd
        self._scheduler = scheduler
        self._num_processes = min(MAX_PROCESSES, settings.num_generators)
        self._homes: dict[str, str] = {}

    async def start(self, placement: WorkerPlacement, on_exit: Callable[[str], None]) -> None:
        number = len(self._homes) % self._num_processes if placement.role == "generator" else 0
        home = self._homes[placement.name] = f"{placement.role}-{number}"
        if home not in self._crowd.processes:
            self._crowd.processes[home] = Child(start_process(self._command(), placement))
        described = {
            "name": placement.name,
            "nthreads": placement.num_threads,
            "resources": placement.resources,
        }
        self._crowd.processes[home].input.write(json.dumps(described).encode() + b"\n")

    def _command(self) -> list[str]:
        program = "import sys; from benchmarks.crowd import main; main(*sys.argv[1:])"
        told = (self._crowd.kind, str(self._crowd.pause_s), self._scheduler, str(os.getpid()))
        return [sys.executable, "-c", program, *told]

    def kill(self, name: str) -> bool:
        raise AssertionError(f"{name} hangs: its process has more to do than a core can")

    async def stop(self, name: str) -> None:
        child = self._crowd.processes.pop(self._homes[name], None)
        if child is not None:
            child.process.kill()
            await child.ended.wait()
            child.close()

    def pid(self, name: str) -> int | None:
        child = self._crowd.processes.get(self._homes[name])
        return child.process.pid if child else None


class SleepingEngine:
    """An `Engine` that has nothing to decode."""

    broken = False

    def __init__(self, version: int) -> None:
        self.version = version

    async def generate(self, request: GroupRequest) -> list[Completion]:
        await _pause()
        return [_completion(self.version) for _ in request.seeds]

    async def load_weights(self, version: int, reader: WeightsReader) -> None:
        self.version = version

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None: ...


async def start_sleeping_engine(
    model: Path, settings: GenerationSettings, reader: WeightsReader
) -> SleepingEngine:
    return SleepingEngine(reader.newest())


async def rollout(episodes: Sequence[Episode], version: int) -> GroupReceipt:
    """In place of `generator_tasks.rollout`: the receipt of a group that nobody makes."""
    await _pause()
    (episode,) = episodes
    index, spans = episode.submission_index, (VersionSpan(version, NUM_TOKENS),)
    members = [
        TrajectoryReceipt(trajectory_id(index, member), spans, float(member % 2), "stop")
        for member in range(len(episode.seeds))
    ]
    return GroupReceipt(index, (), tuple(members))


async def score_and_write(
    receipts: Sequence[GroupReceipt], *_: Any
) -> tuple[list[GroupReceipt], float]:
    """In place of `reward_tasks.score_and_write`: a fragment that is there, as if it were new."""
    first, path = receipts[0], worker_context().layout.trajectories
    fragment = _fragment(path, len(receipts), len(first.trajectories))
    described = json.dumps(fragment | {"first": first.submission_index})
    return [replace(receipt, fragments=(described,)) for receipt in receipts], 0.0


@cache
def _fragment(path: Path, num_groups: int, group_size: int) -> dict[str, Any]:
    seeds, now = group_seeds(0, 0, group_size), datetime.now(UTC)
    drafts = [TrajectoryDraft(PROMPT.tokens).with_completion(_completion(0)) for _ in seeds]
    group = RolledOutGroup(tuple(enumerate(drafts)), ())
    episodes = [Episode(index, PROMPT, seeds, 0, 1, now) for index in range(num_groups)]
    table = rollout_table(
        [(episode, group) for episode in episodes],
        generator="generator-0",
        started_at=now,
        engine_stats=EngineStats(),
    )
    scored = scored_table(table, [Score(1.0, "right")] * len(table), verifier="fake@0")
    (fragment,) = write_groups(path, scored)
    described: dict[str, Any] = json.loads(fragment)
    return described


def _completion(version: int) -> Completion:
    tokens, logprobs = as_tokens(range(NUM_TOKENS)), np.zeros(NUM_TOKENS, np.float32)
    return Completion(tokens, logprobs, (VersionSpan(version, NUM_TOKENS),), "stop")


async def _pause() -> None:
    await asyncio.sleep(_pause_s * _randomness.uniform(0.5, 1.5))


def register(crowd: Crowd) -> None:
    """Make a crowd's launcher and its engine known by name, in this process."""
    launchers.LAUNCHERS["crowd"] = partial(CrowdLauncher, crowd)
    registry.ENGINES["sleeping"] = "benchmarks.crowd:start_sleeping_engine"


def main(kind: str, pause_s: str, scheduler: str, parent: str) -> None:
    """Start a worker for each placement on the standard input; they live as long as the parent."""
    global _pause_s
    end_with_parent(int(parent))
    _pause_s = float(pause_s)
    register(Crowd(kind, _pause_s))
    if kind == "driver":
        generator_tasks.rollout = rollout
        reward_tasks.score_and_write = score_and_write
    asyncio.run(_work(scheduler))


async def _work(scheduler: str) -> None:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    workers = []
    with dask.config.set(DASK_SETTINGS):
        while line := await reader.readline():
            options = {"host": "127.0.0.1", "memory_limit": 0, "dashboard": False}
            workers.append(await Worker(scheduler, **json.loads(line), **options))
