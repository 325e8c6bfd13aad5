"""What a flow is made with: its numbers, its backends, and the state it begins in. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_flow.controller.accounting import TokenAccounting
from areal_flow.controller.buffer import KeepsGroup, keep_every_group
from areal_flow.controller.protocols import (
    Observer,
    Prompts,
    Rollouts,
    StepLedger,
    Trainer,
    TrajectoryLog,
    WeightsPublisher,
)
from areal_flow.types import Discard, EngineStats, GroupReceipt, LogHead


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
