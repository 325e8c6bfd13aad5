"""What a flow is made with beside its recipe: the state it begins in, and what does its work.

Adapters of the protocols are in `cluster` and `store`, fakes in `testing`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_flow.controller.accounting import TokenAccounting
from areal_flow.types import (
    Discard,
    EngineStats,
    Episode,
    GroupReceipt,
    Prompt,
    ServedWeights,
    StepRequest,
    StepResult,
)


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
    watermark: int = 0
    """Rows of the trajectory log."""
    accounting: TokenAccounting = field(default_factory=TokenAccounting)


class Rollouts(Protocol):
    """Runs episodes, in two halves: on generators, then on reward workers."""

    async def roll_out(self, episode: Episode) -> Any:
        """Generate one group; return what `write` takes, its tokens are elsewhere.

        Raises:
            SchemaError: the group cannot be had.
            ArealFlowError: this attempt failed; the message is the root cause.
        """

    async def write(self, rolled_out: Any) -> GroupReceipt:
        """Score a group and write it, while the generators are free for others.

        Raises:
            SchemaError: its rows are not valid.
            EngineError, WeightsError, EpisodeError: its rows were lost with their generator; roll
                it out again.
            ArealFlowError: this attempt failed; the message is the root cause.
        """


class Logs(Protocol):
    """The only committer of trajectories and of steps."""

    async def commit(self, receipts: Sequence[GroupReceipt]) -> int:
        """Make written groups visible, all in one version; once, whatever is retried.

        Returns:
            The watermark: how many rows the log has then.
        """

    async def append(self, row: dict[str, Any]) -> None:
        """Commit a step's row, durably; refuse if this step is there already."""


class Trainer(Protocol):
    """The trainer ranks, as one."""

    async def step(self, request: StepRequest) -> StepResult:
        """Compute one step and stage its weights aside.

        Raises:
            TrainingError: it cannot be computed, or the ranks are not at the parent.
        """

    async def read_ahead(self, trajectory_ids: Sequence[str]) -> None:
        """Read what the next step will likely train, beside the one that runs.

        A hint: whatever becomes of it, the next step trains what its request names.
        """


class WeightsPublisher(Protocol):
    """Makes staged weights current, and generators load them."""

    async def publish(self, version: int) -> None:
        """Rename staged weights into place: from here on they are what a generator loads."""

    async def load_everywhere(self, version: int, served_hash: str) -> Sequence[ServedWeights]:
        """Return when every live generator serves `version`, or is no longer waited for.

        Args:
            served_hash: what the ledger has of the version; a generator that serves another one
                is stopped.

        Returns:
            What generators serve that have an engine.
        """


@dataclass(frozen=True, slots=True)
class FlowBackends:
    """What does the work that the flow orders."""

    rollouts: Rollouts
    logs: Logs
    trainer: Trainer
    weights: WeightsPublisher
    prompt_at: Callable[[int], Prompt]
    """The prompt of a submission; the same for the same run, always."""
    on_step: Callable[[dict[str, Any]], Awaitable[None]]
    """Hears of a step that is committed and published."""
    trainer_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from a step's request until its weights are published. Who restores the trainer to the
    ledger's head holds it, too: the head does not move meanwhile, nor is anything staged."""
