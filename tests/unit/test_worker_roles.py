"""What a worker holds is closed: a broken engine before it is replaced, everything at the end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_flow.cluster import worker_roles
from areal_flow.cluster.worker_context import RunPlugin
from areal_flow.cluster.worker_roles import GeneratorRole
from areal_flow.config import Recipe, dump_recipe
from areal_flow.layout import RunLayout
from areal_flow.types import EngineStats, GroupRequest
from areal_flow.weights.directory import publish_model_directory
from tests.policies import write_model_directory


class FakeEngine:
    """An `Engine` that notes what is done to it."""

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

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    made: list[FakeEngine] = []

    async def start(*_: Any) -> FakeEngine:
        assert all(engine.num_closed for engine in made)
        made.append(FakeEngine())
        return made[-1]

    monkeypatch.setattr(worker_roles, "engine_factory", lambda name: start)
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
        role = GeneratorRole(run_directory, 0, "generator-0")
        first = await role.serve(0)
        assert await role.serve(0) is first
        engines[0].broken = True
        assert await role.serve(0) is engines[1]

    asyncio.run(serve())
    assert [engine.num_closed for engine in engines] == [1, 0]


class Stubborn:
    def close(self) -> None:
        raise RuntimeError("cannot, on purpose")


class Slow:
    closed = False

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed = True


def test_teardown_closes_every_part_that_can_be_closed(
    run_directory: Path, engines: list[FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    async def live() -> Slow:
        worker: Any = SimpleNamespace(name="generator-0", metrics={})
        plugin = RunPlugin(run_directory, 0)
        plugin.setup(worker)
        assert plugin.holder is not None
        plugin.holder.ensure(Stubborn, Stubborn)
        plugin.holder.ensure(dict, dict)
        slow = plugin.holder.ensure(Slow, Slow)
        make = plugin.holder.ensure(GeneratorRole, lambda: GeneratorRole(run_directory, 0, "g"))
        await make.serve(0)
        await plugin.teardown(worker)
        await plugin.teardown(worker)
        assert worker.metrics == {}
        return slow

    assert asyncio.run(live()).closed
    assert [engine.num_closed for engine in engines] == [1]
    assert "Stubborn could not be closed" in caplog.text
