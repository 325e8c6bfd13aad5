"""One GPU in turns: generators sleep, without requests, while the trainer trains."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal_flow.cluster import generator_tasks
from areal_flow.cluster.generator_tasks import GeneratorRole, engine_settings
from areal_flow.cluster.generators import GpuTurns
from areal_flow.cluster.trainer_replicas import DaskTrainer
from areal_flow.cluster.trainer_tasks import _leave_generator_memory
from areal_flow.cluster.worker import PLUGIN_NAME, WorkerContext
from areal_flow.config import Recipe, build_recipe, dump_recipe
from areal_flow.core.errors import EngineError, TrainerLost
from areal_flow.core.layout import RunLayout
from areal_flow.core.machine import ALONE, gpu_lock
from areal_flow.core.types import EngineStats, StepRequest
from areal_flow.planning.gpus import GIB
from areal_flow.planning.memory import generator_memory
from areal_flow.policy.weights.directory import publish_model_directory
from areal_flow.rollout.engines import registry
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.training.tensor_rows import shapes_of
from tests.policies import write_model_directory

EPOCH = 1

REQUEST = StepRequest(1, "parent", 0, (), "digest", 0)


def in_turns(**changed: Any) -> Recipe:
    table = {
        "schedule": "sync",
        "trainer": {"device": "cuda"},
        "generation": {"device": "cuda"},
        "cluster": {"num_gpus": 1},
    }
    return build_recipe({**table, **changed}, source="test")


class GpuEngine:
    """An `Engine` that records its calls, and while asleep refuses all but `wake`."""

    def __init__(self, happened: list[str]) -> None:
        self.happened = happened
        self.version = 0
        self.broken = self.asleep = self.breaks = False
        happened.append("start")

    def _note(self, what: str) -> None:
        assert not self.asleep, f"{what} was asked of a sleeping engine"
        self.happened.append(what)

    async def generate(self, request: Any) -> Sequence[Any]:
        self._note("generate")
        return []

    async def load_weights(self, version: int, reader: Any) -> None:
        self._note(f"load {version}")
        self.version = version

    async def sleep(self) -> None:
        self._note("sleep")
        if self.breaks:
            self.broken = True
            raise EngineError("out of memory")
        self.asleep = True

    async def wake(self) -> None:
        self.asleep = False
        self._note("wake")

    def stats(self) -> EngineStats:
        return EngineStats()

    def occupancy(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.happened.append("close")


class Driver:
    """A driver's turns over one generator whose functions are called directly."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        layout, self.happened = RunLayout(root), list[str]()
        self.engines: list[GpuEngine] = []
        write_model_directory(layout.model)
        publish_model_directory(layout.model, layout.weights_of(EPOCH))
        layout.config.write_text(dump_recipe(in_turns()))
        self.processes = layout.processes_of(EPOCH)
        self.processes.mkdir(parents=True)

        async def start(_: Path, settings: GenerationSettings, *__: Any) -> GpuEngine:
            self.settings = settings
            self.engines.append(GpuEngine(self.happened))
            return self.engines[-1]

        monkeypatch.setattr(os, "setpgrp", lambda: None)
        monkeypatch.setattr(generator_tasks, "engine_factory", lambda name: start)
        self.context = WorkerContext(root, EPOCH)
        self.context.setup(
            SimpleNamespace(  # type: ignore[arg-type]
                name="generator-0",
                ip="127.0.0.1",
                metrics={},
                id="",
                state=SimpleNamespace(total_resources={}),
            )
        )
        self.replaced: list[str] = []
        self.registry = SimpleNamespace(
            present=lambda role: [SimpleNamespace(address=role, is_silent=False)]
        )
        self.turns = GpuTurns(self, self.processes)  # type: ignore[arg-type]

    @property
    def role(self) -> GeneratorRole:
        return self.context.ensure(GeneratorRole, lambda: GeneratorRole(self.context))

    async def run(self, address: str, function: Any, *arguments: Any) -> Any:
        worker = SimpleNamespace(plugins={PLUGIN_NAME: self.context})
        try:
            return await function(*arguments, worker)
        except Exception as error:  # noqa: BLE001 - as `WorkerPool.run` does
            return error

    async def replace(self, address: str, *, why: str) -> None:
        self.replaced.append(address)

    def trainer(self, *outcomes: Exception | str) -> DaskTrainer:
        """Return a trainer whose steps end so."""
        left = list(outcomes)

        async def step(request: Any) -> Any:
            self.happened.append("step")
            if isinstance(outcome := left.pop(0), Exception):
                raise outcome
            return outcome

        async def restore() -> str:
            self.happened.append("restore")
            return ""

        ranks: Any = SimpleNamespace(step=step, read_ahead=None, write_snapshot=None)
        return DaskTrainer(ranks, restore, lost=asyncio.Event(), turn=self.turns.of_trainer)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(tmp_path, monkeypatch)


def within_seconds(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def test_a_shared_gpu_is_taken_in_turns_by_the_sync_schedule_alone() -> None:
    chosen = in_turns(generation={"device": "cuda", "engine": "vllm"})
    assert chosen.takes_turns
    assert chosen.generation.vllm.enable_sleep_mode
    for other in (
        in_turns(schedule="async"),
        in_turns(cluster={"num_gpus": 2}),
        in_turns(trainer={"device": "cpu"}),
    ):
        assert not other.takes_turns
        assert not other.generation.vllm.enable_sleep_mode
    assert not in_turns(
        generation={"device": "cuda", "engine": "torch"}
    ).generation.vllm.enable_sleep_mode


def test_engine_beside_a_trainer_has_a_cache_of_the_planned_size(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM counts what a trainer allocates, while it measures what is free, as its own."""
    gpu = SimpleNamespace(total_memory=16 * GIB)
    monkeypatch.setattr(registry, "installed_vllm", lambda device: device == "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    within_seconds(driver.role.serve(0))  # type: ignore[arg-type]
    model, recipe = driver.context.layout.model, driver.context.recipe
    planned = generator_memory(recipe, shapes_of(model), 16 * GIB)
    assert driver.settings.kv_cache_tokens == planned.cache_tokens > 2048
    assert engine_settings(in_turns(cluster={"num_gpus": 2}), model).kv_cache_tokens == 0
    chosen = {"device": "cuda", "kv_cache_tokens": 4096}
    assert engine_settings(in_turns(generation=chosen), model).kv_cache_tokens == 4096
    gpu.total_memory = 2 * GIB
    with pytest.raises(EngineError, match=r"gpu_memory_utilization \(0\.9\) leaves room for 0 tok"):
        engine_settings(recipe, model)


def test_generators_sleep_before_the_step_and_wake_before_they_load(driver: Driver) -> None:
    async def train() -> None:
        trainer = driver.trainer("1", "2")
        await driver.role.serve(0)
        for version in (1, 2):
            await trainer.step(REQUEST)
            await driver.run("generator", generator_tasks.load_weights, version)
        await driver.role.generate(None)  # type: ignore[arg-type]

    within_seconds(train())
    turn = ["sleep", "step", "wake"]
    assert driver.happened == ["start", *turn, "load 1", *turn, "load 2", "generate"]
    assert not driver.replaced


def test_request_during_the_trainers_turn_waits_for_its_end(driver: Driver) -> None:
    async def train() -> None:
        await driver.role.serve(0)
        async with driver.turns.of_trainer():
            turn = asyncio.create_task(driver.role.generate(None))  # type: ignore[arg-type]
            await asyncio.sleep(0.2)
            driver.happened.append("trained")
        await turn

    within_seconds(train())
    assert driver.happened == ["start", "sleep", "trained", "wake", "generate"]


def test_new_generator_starts_once_the_trainers_turn_is_over(driver: Driver) -> None:
    """As after its process was killed while asleep."""

    async def train() -> None:
        async with driver.turns.of_trainer():
            started = asyncio.create_task(driver.role.serve(0))
            await asyncio.sleep(0.2)
            driver.happened.append("trained")
        await started

    within_seconds(train())
    assert driver.happened == ["trained", "start"]


def test_lost_trainer_is_restored_and_retried_in_its_turns(driver: Driver) -> None:
    async def train() -> None:
        await driver.role.serve(0)
        await driver.trainer(TrainerLost("killed"), "1").step(REQUEST)

    within_seconds(train())
    turns = ["sleep", "step", "restore", "wake", "sleep", "step", "wake"]
    assert driver.happened == ["start", *turns]


def test_engine_that_breaks_when_it_is_to_sleep_is_closed_and_made_anew(driver: Driver) -> None:
    async def train() -> None:
        await driver.role.serve(0)
        driver.engines[0].breaks = True
        async with driver.turns.of_trainer():
            driver.happened.append("trained")
        await driver.role.serve(0)

    within_seconds(train())
    assert driver.happened == ["start", "sleep", "close", "trained", "start"]


@pytest.mark.parametrize(
    "error",
    [OSError("returned by Dask as the answer"), KeyError("raised by Dask: no such worker")],
)
def test_generator_that_does_not_answer_that_it_sleeps_is_replaced(
    error: Exception, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(worker: Any) -> None:
        raise error

    async def train() -> None:
        async with driver.turns.of_trainer():
            assert driver.replaced == ["generator"]

    monkeypatch.setattr(generator_tasks, "sleep", fail)
    within_seconds(train())


def test_turn_of_a_killed_driver_ends_and_its_run_resumes_with_generators_awake(
    driver: Driver,
) -> None:
    program = (
        "import asyncio, pathlib, sys\n"
        "from areal_flow.core.machine import ALONE, gpu_lock\n"
        "async def hold():\n"
        "    async with gpu_lock(pathlib.Path(sys.argv[1]), ALONE):\n"
        "        print('held', flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(hold())\n"
    )
    command = [sys.executable, "-c", program, str(driver.processes)]

    async def resume() -> None:
        with subprocess.Popen(command, stdout=subprocess.PIPE) as killed:
            assert killed.stdout is not None
            assert killed.stdout.readline() == b"held\n"
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2), gpu_lock(driver.processes, ALONE):
                    pass
            killed.kill()
        await driver.role.generate(None)  # type: ignore[arg-type]

    within_seconds(resume())
    assert driver.happened == ["start", "generate"]


def test_a_trainer_beside_vllm_keeps_to_its_part_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without turns: a vLLM that starts again demands its own part."""
    fractions: list[float] = []
    gpu = SimpleNamespace(total_memory=20 * GIB)
    monkeypatch.setattr(registry, "installed_vllm", lambda device: device == "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    generation = {"device": "cuda", "vllm": {"gpu_memory_utilization": 0.4}}
    for recipe in (
        in_turns(generation=generation),
        in_turns(generation={"device": "cuda", "engine": "torch"}, schedule="async"),
        in_turns(generation=generation, schedule="async", cluster={"num_gpus": 2}),
    ):
        _leave_generator_memory(recipe)
    assert fractions == []
    _leave_generator_memory(in_turns(generation=generation, schedule="async"))
    assert fractions == [pytest.approx(0.6 - 1 / 20)]
