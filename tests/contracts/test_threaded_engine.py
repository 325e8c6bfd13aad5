"""An engine's thread: many callers, weights in between, cancellation, and how it ends."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from areal_flow.core.errors import EngineError, WeightsError
from areal_flow.core.types import Completion
from areal_flow.rollout.engines.threaded_engine import ThreadedEngine
from tests.engines import (
    VOCABULARY,
    Subject,
    request_of,
    versions_of,
)
from tests.fakes import BigramEngine


@dataclass(frozen=True)
class FixedReader:
    """A `WeightsReader` of one version."""

    version: int
    tensors: Mapping[str, Any]

    def newest(self) -> int:
        return self.version

    def load(self, version: int) -> Mapping[str, Any]:
        if version != self.version:
            raise WeightsError(f"version {version} was not published")
        return self.tensors


async def test_loop_serves_many_callers_and_counts(subject: Subject) -> None:
    engine = ThreadedEngine(subject.make())
    try:
        groups = await asyncio.gather(
            *(engine.generate(request_of(f"r{i}", length=10)) for i in range(8))
        )
        assert [len(group) for group in groups] == [4] * 8
        stats = engine.stats()
        assert stats.num_tokens == 8 * 4 * 10
        assert 0 < stats.busy_s <= stats.elapsed_s
        await engine.generate(request_of("later", length=10))
        later = engine.stats()
        assert 0 < later.busy_s - stats.busy_s <= later.elapsed_s - stats.elapsed_s
    finally:
        engine.close()


async def test_loop_loads_weights_in_mid_sequence(subject: Subject) -> None:
    engine = ThreadedEngine(subject.make())
    try:
        running = [
            asyncio.create_task(engine.generate(request_of(f"r{i}", length=55))) for i in range(4)
        ]
        await asyncio.sleep(0.01)
        await engine.load_weights(3, FixedReader(3, subject.weights(3)))
        assert engine.version == 3
        after = await engine.generate(request_of("later", length=3))
        assert all(versions_of(completion) == [3, 3, 3] for completion in after)
        await asyncio.gather(*running)
    finally:
        engine.close()


@dataclass(frozen=True)
class ReadsUntil(FixedReader):
    """Reads and verifies weights until a test lets it finish."""

    may_end: threading.Event = field(default_factory=threading.Event)

    def load(self, version: int) -> Mapping[str, Any]:
        assert self.may_end.wait(20), "nothing was decoded while weights were read and verified"
        return super().load(version)


async def test_engine_says_that_it_drains_until_it_serves_the_new_weights(
    subject: Subject,
) -> None:
    engine = ThreadedEngine(subject.make(interruption="drain"))
    try:
        running = asyncio.create_task(engine.generate(request_of("r", length=55)))
        while not engine.occupancy()["batch_size"]:
            await asyncio.sleep(0.001)
        assert engine.occupancy()["draining"] == 0
        loading = asyncio.create_task(engine.load_weights(3, FixedReader(3, subject.weights(3))))
        while not engine.occupancy()["draining"]:
            assert not loading.done()
            await asyncio.sleep(0.001)
        await asyncio.gather(running, loading)
        assert (engine.version, engine.occupancy()["draining"]) == (3, 0)
    finally:
        engine.close()


async def test_decoding_goes_on_while_weights_are_read_and_verified(subject: Subject) -> None:
    """A reader checks hashes in `load`: neither the decode thread nor the event loop waits."""
    engine = ThreadedEngine(subject.make())
    reader = ReadsUntil(3, subject.weights(3))
    try:
        loading = asyncio.create_task(engine.load_weights(3, reader))
        await asyncio.sleep(0)
        meanwhile = await engine.generate(request_of("meanwhile", length=10))
        assert {version for completion in meanwhile for version in versions_of(completion)} == {0}
        reader.may_end.set()
        await loading
        assert engine.version == 3
    finally:
        engine.close()


async def test_loop_cancellation_frees_the_engine(subject: Subject) -> None:
    engine = ThreadedEngine(subject.make(max_num_seqs=2))
    try:
        task = asyncio.create_task(engine.generate(request_of("long", seeds=64, length=55)))
        await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        completions = await asyncio.wait_for(engine.generate(request_of("short", length=2)), 20)
        assert len(completions) == 4
    finally:
        engine.close()


async def test_wrong_weights_break_the_engine_for_good(subject: Subject) -> None:
    engine = ThreadedEngine(subject.make())
    with pytest.raises(EngineError, match="down"):
        await engine.load_weights(1, FixedReader(1, {"nonsense": torch.zeros(1)}))
    with pytest.raises(EngineError, match="down"):
        await engine.generate(request_of())
    assert engine.broken


async def test_dead_engine_answers_with_its_own_error_at_once(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = subject.make()
    step, num_steps = core.step, itertools.count()

    def step_or_die() -> list[tuple[str, list[Completion]]]:
        if next(num_steps) == 3:
            raise RuntimeError("out of memory, on purpose")
        return step()

    monkeypatch.setattr(core, "step", step_or_die)
    engine = ThreadedEngine(core)
    running = [engine.generate(request_of(f"r{i}", length=30)) for i in range(3)]
    async with asyncio.timeout(10):
        errors = await asyncio.gather(*running, return_exceptions=True)
        for later in (engine.generate(request_of("s")), engine.load_weights(1, FixedReader(1, {}))):
            errors += await asyncio.gather(later, return_exceptions=True)
    assert all(isinstance(error, EngineError) for error in errors)
    assert {str(error) for error in errors} == {"the engine is down: out of memory, on purpose"}
    engine.close()


async def test_closed_engine_refuses(subject: Subject) -> None:
    engine = ThreadedEngine(subject.make())
    waiting = asyncio.create_task(engine.generate(request_of(length=55, seeds=500)))
    await asyncio.sleep(0)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        await waiting
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(request_of())


async def test_sleeping_engine_makes_no_step_and_goes_on_when_it_wakes(subject: Subject) -> None:
    core, asleep = subject.make(), False
    step = core.step

    def step_awake() -> Any:
        assert not asleep
        return step()

    def change(to: bool) -> None:
        nonlocal asleep
        asleep = to

    core.step = step_awake  # type: ignore[method-assign]
    engine = ThreadedEngine(core, suspend=lambda: change(True), resume=lambda: change(False))
    try:
        expected = await engine.generate(request_of("whole", length=10))
        running = asyncio.create_task(engine.generate(request_of("before", length=10)))
        await asyncio.sleep(0)
        await engine.sleep()
        waiting = asyncio.create_task(engine.generate(request_of("beside", length=10)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await engine.wake()
        for group in (await running, await waiting):
            assert [c.tokens.tolist() for c in group] == [c.tokens.tolist() for c in expected]
    finally:
        engine.close()


class SlowSwitch(BigramEngine):
    """Takes 50 ms to install weights, immediately or at the next step."""

    at_once = True

    def load_weights(self, tensors: Mapping[str, Any], *, version: int) -> None:
        self.coming = tensors, version
        if self.at_once:
            self._switch()

    def has_work(self) -> bool:
        return super().has_work() or hasattr(self, "coming")

    def step(self) -> list[tuple[str, list[Completion]]]:
        if hasattr(self, "coming"):
            self._switch()
        return super().step()

    def _switch(self) -> None:
        time.sleep(0.05)
        tensors, version = self.coming
        del self.coming
        super().load_weights(tensors, version=version)


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "in a step"])
async def test_only_a_switch_and_the_step_after_it_count_as_a_stall(at_once: bool) -> None:
    table = [[0.0] * VOCABULARY] * VOCABULARY
    core = SlowSwitch(table)
    core.at_once = at_once
    engine = ThreadedEngine(core)
    try:
        running = asyncio.create_task(engine.generate(request_of("long", length=10**6)))
        await asyncio.sleep(0.1)
        assert engine.stats().stall_s == 0
        for version in (1, 2):
            reader = ReadsUntil(version, {"logits": table})
            loading = asyncio.create_task(engine.load_weights(version, reader))
            await asyncio.sleep(0.5)
            reader.may_end.set()
            await loading
        assert 0.1 <= engine.stats().stall_s < 0.5 + 0.5
        running.cancel()
        await asyncio.wait([running])
        await engine.load_weights(3, FixedReader(3, {"logits": table}))
        idle = engine.stats().stall_s
        await engine.load_weights(4, FixedReader(4, {"logits": table}))
        if at_once:
            assert engine.stats().stall_s == idle
    finally:
        engine.close()


async def test_weights_that_cannot_be_read_leave_the_engine_as_it_was(subject: Subject) -> None:
    engine = ThreadedEngine(subject.make())
    try:
        with pytest.raises(WeightsError, match="not published"):
            await engine.load_weights(2, FixedReader(1, subject.weights(1)))
        assert not engine.broken
        (completion, *_) = await engine.generate(request_of())
        assert set(versions_of(completion)) == {0}
    finally:
        engine.close()


class FailingEngine(BigramEngine):
    """Delivers one group, then raises."""

    delivered = False

    def step(self) -> list[tuple[str, list[Completion]]]:
        if self.delivered:
            raise RuntimeError("out of memory, on purpose")
        complete = super().step()
        self.delivered = bool(complete)
        return complete


async def test_engine_that_dies_fails_every_caller_and_leaves_none_waiting() -> None:
    table = [[0.0] * VOCABULARY] * VOCABULARY
    engine = ThreadedEngine(FailingEngine(table, max_num_seqs=64))
    requests = [request_of("r0", length=1), *(request_of(f"r{i}", length=9) for i in range(1, 8))]
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)
    time.sleep(0.2)  # keep the event loop busy while the thread delivers one and dies
    _, waiting = await asyncio.wait(tasks, timeout=5)
    assert not waiting
    assert len(tasks[0].result()) == 4
    assert all(isinstance(task.exception(), EngineError) for task in tasks[1:])
