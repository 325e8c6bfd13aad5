"""The protocols of what a flow uses. Adapters are in `cluster` and `store`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from areal_flow.types import (
    Episode,
    GroupReceipt,
    LogHead,
    Prompt,
    StepRequest,
    StepResult,
)


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
