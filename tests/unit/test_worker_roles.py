"""Workers close what they hold: a broken engine before it is replaced, everything at the end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal_flow.cluster import generator_tasks
from areal_flow.cluster.generator_tasks import GeneratorRole
from areal_flow.cluster.worker import PLUGIN_NAME, SERVED_METRIC, WorkerContext
from areal_flow.config import Recipe, dump_recipe
from areal_flow.core.layout import RunLayout
from areal_flow.core.types import EngineStats, GroupRequest
from areal_flow.policy.models.hashing import hash_tensors
from areal_flow.policy.weights.directory import (
    DirectoryReader,
    DirectoryWriter,
    publish_model_directory,
)
from tests.policies import write_model_directory

NO_RESOURCES = SimpleNamespace(total_resources={})


class FakeEngine:
    """An `Engine` that records its calls."""

    def __init__(self) -> None:
        self.version = 0
        self.broken = False
        self.num_closed = 0

    async def generate(self, request: GroupRequest) -> list[Any]:
        return []

    async def load_weights(self, version: int, reader: Any) -> None:
        self.version = version

    def stats(self) -> EngineStats:
        return EngineStats()

    def occupancy(self) -> dict[str, float]:
        return {"batch_size": 2, "cache_fraction": 0.5}

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    made: list[FakeEngine] = []

    async def start(*_: Any) -> FakeEngine:
        assert all(engine.num_closed for engine in made)
        made.append(FakeEngine())
        return made[-1]

    monkeypatch.setattr(os, "setpgrp", lambda: None)
    monkeypatch.setattr(generator_tasks, "engine_factory", lambda name: start)
    return made


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    layout = RunLayout(tmp_path)
    write_model_directory(layout.model)
    publish_model_directory(layout.model, layout.weights_of(0))
    layout.config.write_text(dump_recipe(Recipe()))
    return tmp_path


def test_broken_engine_is_closed_before_it_is_replaced(
    run_directory: Path, engines: list[FakeEngine]
) -> None:
    async def serve() -> None:
        role = GeneratorRole(WorkerContext(run_directory, 0))
        first = await role.serve(0)
        assert await role.serve(0) is first
        engines[0].broken = True
        assert await role.serve(0) is engines[1]

    asyncio.run(serve())
    assert [engine.num_closed for engine in engines] == [1, 0]


def test_generator_says_what_it_serves_and_what_its_update_cost(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LoadingEngine(FakeEngine):
        stall_s = 0.0

        async def load_weights(self, version: int, reader: Any) -> None:
            reader.load(version)
            self.version, self.stall_s = version, self.stall_s + 0.5

        def stats(self) -> EngineStats:
            return EngineStats(stall_s=self.stall_s)

    async def start(model: Path, settings: Any, reader: Any) -> FakeEngine:
        engine = LoadingEngine()
        reader.load(0)
        return engine

    monkeypatch.setattr(os, "setpgrp", lambda: None)
    monkeypatch.setattr(generator_tasks, "engine_factory", lambda name: start)
    channel = DirectoryWriter(RunLayout(run_directory).weights_of(0))
    hashes = [(channel.root / "00000000" / "hash").read_text()]

    async def serve() -> list[dict[str, Any]]:
        worker: Any = SimpleNamespace(
            name="generator-0", ip="127.0.0.1", metrics={}, plugins={}, state=NO_RESOURCES
        )
        context = worker.plugins[PLUGIN_NAME] = WorkerContext(run_directory, 0)
        context.setup(worker)
        role = context.ensure(GeneratorRole, lambda: GeneratorRole(context))
        assert worker.metrics[SERVED_METRIC](worker) is None
        assert await generator_tasks.load_weights(0, worker) is None
        await role.serve(0)
        heard = [worker.metrics[SERVED_METRIC](worker)]
        for version in (1, 2):
            channel.stage(version, {"a": torch.full((9,), float(version))})
            channel.publish(version)
            served = await generator_tasks.load_weights(version, worker)
            heard.append(worker.metrics[SERVED_METRIC](worker))
            assert served is not None
            assert asdict(served) == heard[-1]
        role.close()
        assert worker.metrics[SERVED_METRIC](worker) is None
        return heard

    heard = asyncio.run(serve())
    assert [report["policy_version"] for report in heard] == [0, 1, 2]
    assert [report["stall_s"] for report in heard] == [0, 0.5, 0.5]
    assert all(report["transfer_s"] > 0 for report in heard)
    served = [{"a": torch.full((9,), float(version))} for version in (1, 2)]
    hashes = [hashes[0], *map(hash_tensors, served)]
    assert [report["served_hash"] for report in heard] == hashes


def test_generator_serves_the_requested_version_although_the_listing_is_older(
    run_directory: Path, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve() -> list[int]:
        role = GeneratorRole(WorkerContext(run_directory, 0))
        versions = [(await role.serve(0)).version]
        monkeypatch.setattr(DirectoryReader, "newest", lambda reader: 2)  # stale, then newer
        for version in (1, 3):
            versions.append((await role.serve(version)).version)
        return versions

    assert asyncio.run(serve()) == [0, 2, 3]


class Stubborn:
    def close(self) -> None:
        raise RuntimeError("cannot, on purpose")


class Slow:
    closed = False

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed = True


def test_teardown_closes_every_closable_part(
    run_directory: Path, engines: list[FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    async def live() -> Slow:
        worker: Any = SimpleNamespace(name="generator-0", ip="", metrics={}, state=NO_RESOURCES)
        context = WorkerContext(run_directory, 0)
        context.setup(worker)
        context.ensure(Stubborn, Stubborn)
        context.ensure(dict, dict)
        slow = context.ensure(Slow, Slow)
        role = context.ensure(GeneratorRole, lambda: GeneratorRole(context))
        await role.serve(0)
        await context.teardown(worker)
        await context.teardown(worker)
        assert worker.metrics == {}
        return slow

    assert asyncio.run(live()).closed
    assert [engine.num_closed for engine in engines] == [1]
    assert "Stubborn could not be closed" in caplog.text


RECEIVE = """
import os
from pathlib import Path
from types import SimpleNamespace
import pyarrow as pa
from distributed.protocol import deserialize, serialize
from areal_flow.cluster.worker import WorkerContext

os.setpgrp = lambda: None
state = SimpleNamespace(total_resources={})
worker = SimpleNamespace(name="reward-0", ip="", metrics={}, state=state)
WorkerContext(Path("."), 0).setup(worker)
table = pa.table({"numbers": pa.array(range(9), pa.int64())})
header, (frame, *notes) = serialize((table, {"notes"}))  # as a rollout's result
for offset in range(8):
    moved = memoryview(bytearray(offset) + bytes(frame))[offset:]
    received, _ = deserialize(header, [moved, *notes])
    column = received["numbers"].chunk(0)
    assert column.to_pylist() == list(range(9))
    assert column.buffers()[1].address % 8 == 0
"""


def test_tables_are_aligned_wherever_their_bytes_arrive() -> None:
    subprocess.run([sys.executable, "-c", RECEIVE], check=True)
