"""Workers join, leave, hang or keep dying during a run: it goes on, and tokens add up."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import areal_flow
from areal_flow.cluster.control import WorkerStatus, list_workers
from areal_flow.config import Recipe
from areal_flow.config.cluster import NetworkSettings
from areal_flow.core.errors import EngineError
from areal_flow.core.layout import RunLayout
from pipelines.cluster_address import scheduler_of
from tests.integration.runs import check_accounting, cli, run_while, small_recipe, step_reached


def elastic_recipe(*, checkpoint_every_steps: int = 2, **cluster: Any) -> Recipe:
    return small_recipe(
        trainer={"checkpoint_every_steps": checkpoint_every_steps},
        num_steps=10_000,
        prompts={"num_held_out": 0},
        cluster={"num_generators": 2, **cluster},
    )


def check_generation_went_on(before: int, after: int, *, head: int) -> None:
    """More trajectories are committed than before, or a batch is ready beside the one in hand.

    The gate submits nothing more while that is so. A trainer that is stopped at a checkpoint has
    none in hand: for this there must be none.
    """
    assert before < after or after >= elastic_recipe().controller.batch_size * (head + 2)


class Observed:
    """The driver's view of its workers."""

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout

    @property
    def scheduler(self) -> tuple[str, NetworkSettings]:
        return scheduler_of(self.layout.root.parent, self.layout.name)

    async def worker(self, name: str) -> WorkerStatus | None:
        statuses = [status for status in await list_workers(*self.scheduler) if status.name == name]
        return statuses[0] if statuses else None

    async def process(self, name: str, *, other_than: int = 0) -> int:
        """Wait for the worker to register with a new process and return that process."""
        while True:
            status = await self.worker(name)
            if status is not None and status.pid not in (0, other_than):
                return status.pid
            await asyncio.sleep(0.1)

    def head(self) -> int:
        return len(areal_flow.open_run(self.layout.root).steps("arrow")) - 1

    def num_committed(self) -> int:
        run = areal_flow.open_run(self.layout.root)
        return len(run.trajectories("arrow", columns=["trajectory_id"]))

    async def cli(self, *arguments: str) -> str:
        """Run `areal-flow workers` and return its output."""
        runs = self.layout.root.parent
        done = await asyncio.to_thread(cli, "--runs", runs, "workers", *arguments, cwd=runs.parent)
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def answered(self, generator: str) -> None:
        """Wait until this generator has committed a trajectory."""
        while not self.answers(generator):
            await asyncio.sleep(0.3)

    def answers(self, generator: str) -> list[dict[str, Any]]:
        run = areal_flow.open_run(self.layout.root)
        where = f"generator = '{generator}'"
        return run.trajectories("arrow", where=where, columns=["version_spans"]).to_pylist()


def oldest_version(answers: list[dict[str, Any]]) -> int:
    return min(span["version"] for answer in answers for span in answer["version_spans"])


@pytest.mark.slow
def test_generators_that_join_serve_the_newest_weights_and_leave_without_a_loss(
    tmp_path: Path,
) -> None:
    layout = RunLayout((tmp_path / "runs" / "e").resolve())
    observed = Observed(layout)
    at_join: dict[str, int] = {}

    async def join_and_leave() -> None:
        await step_reached(layout, 2)
        assert "generator-1" in await observed.cli("list", "e")
        at_join["generator-2"] = observed.head()
        added = await observed.cli("add", "e", "--role", "generator")
        assert "generator-2 joined e" in added
        await observed.answered("generator-2")
        await observed.cli("remove", "e", "generator-0")
        assert await observed.worker("generator-0") is None
        await step_reached(layout, observed.head() + 1)

    run_while(layout.root, elastic_recipe(), join_and_leave)
    check_accounting(layout)
    for name, version in at_join.items():
        assert oldest_version(observed.answers(name)) >= version >= 2


@pytest.mark.slow
def test_stopped_workers_are_replaced_and_stall_nobody_meanwhile(tmp_path: Path) -> None:
    layout = RunLayout((tmp_path / "runs" / "h").resolve())
    observed = Observed(layout)
    heads: list[int] = []
    committed: list[int] = []

    async def stop_generator_then_trainer() -> None:
        await step_reached(layout, 2)
        heads.append(observed.head())
        await stop_until_replaced("generator-1")
        await step_reached(layout, observed.head() + 1)
        heads.append(observed.head())
        committed.append(observed.num_committed())
        pid = await stop_until_replaced("trainer-0")
        committed.append(observed.num_committed())
        heads.append(observed.head())
        os.kill(pid, signal.SIGKILL)  # while it is being restored
        await step_reached(layout, heads[1] + 1)

    async def stop_until_replaced(name: str) -> int:
        pid = await observed.process(name)
        os.kill(pid, signal.SIGSTOP)
        return await observed.process(name, other_than=pid)

    recipe = elastic_recipe(checkpoint_every_steps=1000, heartbeat_timeout_s=5.0)
    run_while(layout.root, recipe, stop_generator_then_trainer)
    check_accounting(layout)
    rows = areal_flow.open_run(layout.root).steps("arrow").to_pylist()
    stalls = [row["step_s"] for row in rows if heads[0] < row["step"] <= heads[1]]
    assert max(stalls) < 12.0
    check_generation_went_on(*committed, head=heads[2])


@pytest.mark.slow
def test_generator_that_keeps_dying_is_quarantined_and_the_last_one_ends_the_run(
    tmp_path: Path,
) -> None:
    layout = RunLayout((tmp_path / "runs" / "q").resolve())
    observed = Observed(layout)

    async def kill_one_then_the_other() -> None:
        await step_reached(layout, 1)
        await kill_until_quarantined("generator-1")
        await step_reached(layout, observed.head() + 1)
        await kill_until_quarantined("generator-0")
        await asyncio.sleep(60)  # the run ends by itself, which cancels this

    async def kill_until_quarantined(name: str) -> None:
        killed = 0
        while (status := await observed.worker(name)) and status.state != "quarantined":
            if status.pid not in (0, killed):
                killed = status.pid
                os.kill(killed, signal.SIGKILL)
            await asyncio.sleep(0.1)

    with pytest.raises(EngineError, match="no generator left: generator-0 is quarantined"):
        run_while(layout.root, elastic_recipe(), kill_one_then_the_other)
    check_accounting(layout)
