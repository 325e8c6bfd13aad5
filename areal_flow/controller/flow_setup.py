"""What a flow is made with: its numbers, the state it begins in, and what does its work.

Adapters of the protocols are in `cluster` and `store`, fakes in `testing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_flow.controller.accounting import TokenAccounting
from areal_flow.controller.buffer import KeepsGroup, keep_every_group
from areal_flow.types import (
    Discard,
    EngineStats,
    Episode,
    GroupReceipt,
    LogHead,
    Prompt,
    StepRequest,
    StepResult,
)


@dataclass(frozen=True, slots=True)
class FlowConfig:
    """The numbers that shape a run's flow; trajectories, groups and versions."""

    batch_size: int
    group_size: int
    max_staleness: int
    max_running: int
    num_steps: int
    run_seed: int
    max_attempts: int = 3
    max_consecutive_failures: int = 4
    retry_delay_s: float = 0.5
    keeps_group: KeepsGroup = keep_every_group

    @property
    def groups_per_step(self) -> int:
        return self.batch_size // self.group_size


@dataclass(frozen=True, slots=True)
class InitialState:
    """Where a run begins: the genesis of a new one, or what recovery found."""

    policy_version: int = 0
    weights_hash: str = ""
    next_submission_index: int = 0
    resubmit: tuple[int, ...] = ()
    waiting: tuple[GroupReceipt, ...] = ()
    discards: tuple[Discard, ...] = ()
    engine_totals: tuple[EngineStats, ...] = ()
    """What engines had done before, an evaluation for instance; the flow must not count that."""
    log_head: LogHead = field(default_factory=LogHead)
    accounting: TokenAccounting = field(default_factory=TokenAccounting)


class Prompts(Protocol):
    """Prompts by submission index."""

    def prompt_at(self, submission_index: int) -> Prompt:
        """Return the prompt of this submission; the same for the same run, always."""
        ...


class Rollouts(Protocol):
    """Runs episodes on the generators, reward workers and writers."""

    async def run(self, episode: Episode) -> GroupReceipt:
        """Roll out, score and write one group.

        Raises:
            ArealFlowError: this attempt failed; the message is the root cause.
        """
        ...


class TrajectoryLog(Protocol):
    """The only committer of trajectories."""

    async def commit(self, receipts: Sequence[GroupReceipt]) -> LogHead:
        """Make written groups visible, all in one version; once, whatever is retried."""
        ...


class StepLedger(Protocol):
    """The only committer of steps."""

    async def append(self, row: dict[str, Any]) -> None:
        """Commit one row, durably; refuse if this step is there already."""
        ...


class Trainer(Protocol):
    """The trainer ranks, as one."""

    async def step(self, request: StepRequest) -> StepResult:
        """Compute one step and stage its weights aside.

        Raises:
            TrainingError: the loss is not finite, or the ranks are not at the parent.
        """
        ...


class WeightsPublisher(Protocol):
    """Makes staged weights current, and generators load them."""

    async def publish(self, version: int) -> None:
        """Rename staged weights into place: from here on they are what a generator loads."""
        ...

    async def load_everywhere(self, version: int) -> None:
        """Return when every live generator serves `version`, or is no longer waited for."""
        ...


class Observer(Protocol):
    """Hears of each step: a progress display, tracking, checkpoints."""

    async def on_step(self, row: dict[str, Any]) -> None:
        """A step is committed and published."""
        ...


@dataclass(frozen=True, slots=True)
class FlowBackends:
    """What does the work that the flow orders."""

    prompts: Prompts
    rollouts: Rollouts
    log: TrajectoryLog
    ledger: StepLedger
    trainer: Trainer
    weights: WeightsPublisher
    observer: Observer
