"""What a flow is made with beside its recipe: the state it begins in, and what does its work.

`cluster` and `log` implement the protocols, `planning/simulator.py` in virtual time, and
`tests/flow_fakes.py` fakes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_flow.config import Recipe
from areal_flow.core.errors import ArealFlowError, WorkersLost
from areal_flow.core.types import (
    Discard,
    EngineStats,
    Episode,
    GroupReceipt,
    Prompt,
    ServedWeights,
    StepRequest,
    StepResult,
)
from areal_flow.log.ledger_row import TokenAccounting


@dataclass(frozen=True, slots=True)
class InitialState:
    """Where a run begins: step 0 of a new one, or what recovery found."""

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


MAX_COLLATERAL_FAILURES = 20
"""How many failures that may be the fault of others a group survives, such as a worker's death."""


class RetryBudget:
    """How many failures one group survives, those of generation and of scoring together.

    Whoever catches a failure and tries again spends it. What may be the fault of another group, as
    the death of a worker that several share, spends from an allowance of its own.
    """

    def __init__(self, max_attempts: int) -> None:
        self.max_attempts = max_attempts
        self.num_failures = 0
        self.num_collateral = 0
        self.exhausted = ""
        """Which part of the budget is exhausted; empty while none is."""

    @property
    def is_last_attempt(self) -> bool:
        return self.num_failures + 1 >= self.max_attempts

    def spend(self, failure: ArealFlowError, *, is_collateral: bool = False) -> bool:
        """Count a failure; return whether the group may be tried again."""
        if isinstance(failure, WorkersLost) or is_collateral:
            self.num_collateral += 1
            if self.num_collateral > MAX_COLLATERAL_FAILURES:
                self.exhausted = (
                    f"no retry is left of {MAX_COLLATERAL_FAILURES} after failures that other "
                    "groups may have caused"
                )
        else:
            self.num_failures += 1
            if self.num_failures >= self.max_attempts:
                self.exhausted = (
                    f"no attempt is left: controller.max_attempts = {self.max_attempts}"
                )
        return not self.exhausted


class Rollouts(Protocol):
    """Generates groups, then scores and writes them."""

    async def roll_out(self, episode: Episode, budget: RetryBudget) -> Any:
        """Generate the completions of one group; return what stands for its rows.

        Raises:
            SchemaError: no attempt can generate the group.
            ArealFlowError: this attempt failed; the message is the root cause.
        """

    async def write(self, rows: Any, budget: RetryBudget) -> GroupReceipt:
        """Score a group and write it, while its generator works on other groups.

        Raises:
            SchemaError: its rows are not valid.
            EngineError, WeightsError, EpisodeError: its rows were lost with their generator; roll
                it out again.
            ArealFlowError: this attempt failed; the message is the root cause.
        """


class Logs(Protocol):
    """Commits trajectories and steps."""

    async def commit(self, receipts: Sequence[GroupReceipt]) -> int:
        """Make written groups visible, all in one version and only once, also after retries.

        Returns:
            The watermark: the number of rows in the log.
        """

    async def append(self, row: dict[str, Any]) -> None:
        """Commit a step's row durably; refuse a step that the ledger has already."""


class Trainer(Protocol):
    """The trainer ranks, as one."""

    lock: asyncio.Lock
    """Held from a step's request until its weights are published, and while the trainer is
    restored to the ledger's head: during a restoration the head does not move."""

    async def step(self, request: StepRequest) -> StepResult:
        """Compute one step and stage its weights, unpublished.

        Raises:
            TrainingError: the step cannot be computed, or the ranks do not hold its parent.
        """

    async def read_ahead(self, trajectory_ids: Sequence[str]) -> None:
        """Read what the next step will likely train, while the current step runs.

        This is a hint: the next step trains what its request names.
        """


class WeightsPublisher(Protocol):
    """Makes staged weights current, and generators load them."""

    async def publish(self, version: int) -> None:
        """Rename staged weights into place: generators load them from now on."""

    async def load_everywhere(self, version: int, served_hash: str) -> Sequence[ServedWeights]:
        """Return when every live generator serves `version`, or is no longer waited for.

        Args:
            served_hash: of this version in the ledger; a generator that serves another hash is
                replaced.

        Returns:
            What each generator with an engine serves.
        """


@dataclass(frozen=True, slots=True)
class FlowBackends:
    """What executes the stages of a flow."""

    rollouts: Rollouts
    logs: Logs
    trainer: Trainer
    weights: WeightsPublisher
    prompt_at: Callable[[int], Prompt]
    """The prompt of a submission; it depends on the run and the index only."""
    on_step: Callable[[dict[str, Any]], Awaitable[None]]
    """Called with the row of each step that is committed and published."""
    usage: Callable[[], Mapping[str, float]] = dict
    """What the run's processes use now, as metrics of the step's row."""


def groups_in_flight(recipe: Recipe) -> int:
    """Return how many groups one generator holds: enough to fill its slots, and two that wait."""
    return -(-recipe.generation.max_num_seqs // recipe.controller.group_size) + 2


def max_running_trajectories(recipe: Recipe, *, num_generators: int) -> int:
    """Return how many trajectories may be on the cluster: those that run, and as many queued.

    A queued group ages no tokens, and its generator starts it without the scheduler.
    """
    groups = 2 * groups_in_flight(recipe) * max(1, num_generators)
    return groups * recipe.controller.group_size
