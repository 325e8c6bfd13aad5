"""A small flow whose backends are scripted by the test, stage by stage."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from areal_flow.core.types import (
    Episode,
    GroupReceipt,
    TrajectoryReceipt,
    VersionSpan,
    trajectory_id,
)
from areal_flow.flow.flow import Flow
from areal_flow.flow.flow_setup import FlowBackends, InitialState, RetryBudget
from areal_flow.log.ledger_row import Provenance, TokenAccounting
from areal_flow.planning.virtual_time import run_in_virtual_time
from tests.flow_fakes import FakeCluster, MemoryLog, flow_recipe, prompt_at


def group(index: int, *, version: int = 0, scored: bool = True, **receipt: Any) -> GroupReceipt:
    """Return a written group of two members with four tokens each."""
    members = tuple(
        TrajectoryReceipt(
            trajectory_id(index, member),
            (VersionSpan(version, 4),),
            float(member) if scored else None,
            "stop",
        )
        for member in (0, 1)
    )
    return GroupReceipt(index, (f"fragment-{index}",), members, **receipt)


@dataclass
class Rollouts:
    """Ends episodes with `outcomes`, in order; without one, immediately and successfully."""

    outcomes: list[GroupReceipt | BaseException] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)
    started_at: list[float] = field(default_factory=list)
    duration_s: float = 0.0
    write_s: float = 0.0
    write_failures: list[BaseException] = field(default_factory=list)

    async def roll_out(self, episode: Episode, budget: RetryBudget) -> GroupReceipt:
        self.episodes.append(episode)
        self.started_at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.duration_s)
        outcome = self.outcomes.pop(0) if self.outcomes else group(episode.submission_index)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def write(self, rows: GroupReceipt, budget: RetryBudget) -> GroupReceipt:
        await asyncio.sleep(self.write_s)
        if self.write_failures:
            raise self.write_failures.pop(0)
        return rows


@dataclass
class Parts:
    """A flow of two trajectories per step, with its backends."""

    rollouts: Rollouts = field(default_factory=Rollouts)
    log: MemoryLog = field(default_factory=MemoryLog)
    cluster: FakeCluster = field(default_factory=lambda: FakeCluster(random.Random(0)))

    def flow(
        self, initial: InitialState | None = None, *, max_running: int = 64, **numbers: Any
    ) -> Flow:
        defaults = {
            "batch_size": 2,
            "group_size": 2,
            "max_staleness": 0,
            "num_steps": 9,
            "seed": 5,
        }
        initial = initial or InitialState()
        for receipt in initial.waiting:
            self.cluster.spans |= {t.trajectory_id: t.version_spans for t in receipt.trajectories}
        return Flow(
            flow_recipe(**{**defaults, **numbers}),
            FlowBackends(
                rollouts=self.rollouts,
                logs=self.log,
                trainer=self.cluster,
                weights=self.cluster,
                prompt_at=prompt_at,
                on_step=self.log.on_step,
            ),
            initial,
            Provenance(6, "config", "code"),
            max_running=max_running,
        )


def waiting(*indices: int, **initial: Any) -> InitialState:
    """Return the state of a resumed run with these groups in the log."""
    return InitialState(
        waiting=tuple(group(index) for index in indices),
        accounting=TokenAccounting(committed=8 * len(indices)),
        next_submission_index=max(indices) + 1,
        **initial,
    )


async def train_once(flow: Flow) -> None:
    batch = await flow.wait_for_batch()
    assert batch is not None
    await flow.train(batch, wait_s=1.25)


async def roll_out(flow: Flow, num_groups: int = 1) -> None:
    """Submit this many groups, one after another, and commit their results."""
    for _ in range(num_groups):
        flow.submit()
        await asyncio.sleep(60)
        await flow.commit_written()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return run_in_virtual_time(coroutine)
