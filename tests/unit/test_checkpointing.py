"""Checkpoints over a fake trainer: when one is taken, what a death costs, what is pruned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest

from areal_flow.core.errors import RunError, TrainerLost
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import hold_lease
from areal_flow.core.types import PolicyHashes
from areal_flow.flow.recovery.checkpointing import Checkpoints
from areal_flow.log.ledger_row import Provenance, genesis_row
from areal_flow.log.run_log import RunLog, create_logs
from areal_flow.policy.checkpoints import checkpoint_hashes, list_checkpoints, record_fork
from areal_flow.training.settings import TrainerSettings
from tests.checkpoints import write_fake_checkpoint


@dataclass
class FakeTrainer:
    """A trainer that writes the last copied state, and dies a given number of times."""

    layout: RunLayout
    num_deaths: int = 0
    hangs: bool = False
    held: str = ""
    """What a replay made, if that is not what the ledger has."""
    copied: str = ""
    num_written: int = 0

    async def take_snapshot(self, *, weights_hash: str, next_submission_index: int) -> None:
        self.copied = self.held or weights_hash

    async def write_snapshot(self, step: int) -> None:
        if self.num_deaths:
            self.num_deaths -= 1
            raise TrainerLost("died while it wrote")
        if self.hangs:  # as a task does whose trainer is quarantined
            await asyncio.Event().wait()
        write_fake_checkpoint(self.layout, step, weights_hash=self.copied)
        self.num_written += 1


@dataclass
class FakeRegistry:
    """A registry that protects given versions."""

    aliased: set[Path] = field(default_factory=set)
    num_woken: int = 0

    def wake(self) -> None:
        self.num_woken += 1

    def protected(self) -> frozenset[Path]:
        return frozenset(self.aliased)


@dataclass
class Driver:
    """One driver's parts, and a run that steps."""

    layout: RunLayout
    log: RunLog
    trainer: FakeTrainer
    registry: FakeRegistry
    checkpoints: Checkpoints

    async def step_to(self, last: int) -> None:
        for step in range(self.log.head + 1, last + 1):
            await self.take_step(step)
        await self.checkpoints.settle()

    async def take_step(self, step: int) -> None:
        hashes = {item.name: "h" for item in fields(PolicyHashes)}
        row = genesis_row(
            PolicyHashes(**{**hashes, "weights_hash": f"w{step}"}),
            provenance=Provenance(1, "config", "code"),
            numeric_environment="{}",
        )
        await self.log.append({**row, "step": step})
        if step:
            await self.checkpoints.after_step({**row, "step": step})
        else:
            await self.checkpoints.complete()


@asynccontextmanager
async def driving(root: Path, **trainer_options: int) -> AsyncIterator[Driver]:
    layout = RunLayout(root)
    create_logs(layout)
    with hold_lease(layout.writers) as writer:
        log = RunLog(layout, writer)
        trainer, registry = FakeTrainer(layout, **trainer_options), FakeRegistry()
        checkpoints = Checkpoints(
            layout,
            TrainerSettings(checkpoint_every_steps=2, keep_checkpoints=2),
            log=log,
            trainer=trainer,
            registry=registry,
            writer=writer,
        )
        yield Driver(layout, log, trainer, registry, checkpoints)


async def test_first_and_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    async with driving(tmp_path) as driver:
        await driver.step_to(9)
        assert list_checkpoints(driver.layout.checkpoints) == [0, 6, 8]
        assert driver.registry.num_woken >= 5


async def test_protected_checkpoint_is_not_pruned(tmp_path: Path) -> None:
    async with driving(tmp_path) as driver:
        await driver.step_to(4)
        driver.registry.aliased.add(driver.layout.checkpoints / "00000002")
        await driver.step_to(10)
        assert list_checkpoints(driver.layout.checkpoints) == [0, 2, 8, 10]


async def test_tokens_are_needed_after_the_oldest_checkpoint_but_the_first(tmp_path: Path) -> None:
    async with driving(tmp_path) as driver:
        await driver.step_to(1)
        assert driver.log.tokens_needed_after == 0
        await driver.step_to(4)
        driver.registry.aliased.add(driver.layout.checkpoints / "00000004")
        await driver.step_to(10)
        assert list_checkpoints(driver.layout.checkpoints) == [0, 4, 8, 10]
        assert driver.log.tokens_needed_after == 4


async def test_trainer_that_dies_costs_one_checkpoint_and_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with driving(tmp_path) as driver:
        await driver.step_to(1)
        driver.trainer.num_deaths = 1
        await driver.step_to(5)
        assert list_checkpoints(driver.layout.checkpoints) == [0, 4]
        assert "the ledger still leads to it" in caplog.text


async def test_last_checkpoint_is_written_whatever_happens_to_the_trainer(tmp_path: Path) -> None:
    async with driving(tmp_path) as driver:
        await driver.step_to(3)
        driver.trainer.num_deaths = 2
        await driver.checkpoints.complete()
        assert list_checkpoints(driver.layout.checkpoints) == [0, 2, 3]
        await driver.step_to(5)
        driver.trainer.num_deaths = 3
        with pytest.raises(TrainerLost, match="died 3 times in its last checkpoint"):
            await driver.checkpoints.complete()


async def test_checkpoint_of_a_fork_of_the_last_step_completes_the_run(tmp_path: Path) -> None:
    async with driving(tmp_path) as driver:
        await driver.step_to(3)
        replayed = {"weights_hash": "fork", "served_hash": "h"}
        record_fork(driver.layout.forks, {"step": 3, "replayed": replayed})
        driver.trainer.held = "fork"
        await driver.checkpoints.complete()
        assert checkpoint_hashes(driver.layout.checkpoints)[3] == "fork"


async def test_checkpoint_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    async with driving(tmp_path) as driver:
        await driver.step_to(2)
        num_written = driver.trainer.num_written
        await driver.checkpoints.complete()
        assert driver.trainer.num_written == num_written


async def test_driver_that_was_taken_over_prunes_nothing(tmp_path: Path) -> None:
    async with driving(tmp_path) as driver:
        await driver.step_to(4)
        with hold_lease(driver.layout.writers, take_over=True):
            write_fake_checkpoint(driver.layout, 6, weights_hash="of its successor")
            with pytest.raises(RunError, match="taken over"):
                await driver.checkpoints.complete()
        assert list_checkpoints(driver.layout.checkpoints) == [0, 2, 4, 6]


async def test_checkpoint_that_no_trainer_writes_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async with driving(tmp_path) as driver:
        await driver.step_to(1)
        driver.trainer.hangs = True
        await driver.take_step(2)
        await asyncio.wait_for(driver.checkpoints.cancel(), 10)
        await driver.checkpoints.settle()
        assert list_checkpoints(driver.layout.checkpoints) == [0]
