"""Counts completion tokens, so that committed = trained + masked + discarded + waiting."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from areal_flow.core.types import Discard, EngineStats, GroupReceipt
from areal_flow.log.ledger_row import StepEntries


@dataclass(frozen=True, slots=True)
class CommittedGroups:
    submission_indices: Set[int] = frozenset()
    num_tokens: int = 0
    other_verifier: Set[str] = frozenset()
    """Ids of trajectories that wait and that another verifier scored than the one that counts."""


@dataclass(slots=True)
class TokenAccounting:
    """Totals of the run so far, and the entries of the next ledger row."""

    committed: int = 0
    trained: int = 0
    masked: int = 0
    discarded: int = 0
    in_step: int = 0
    entries: StepEntries = field(default_factory=StepEntries)
    engine_totals: dict[str, EngineStats] = field(default_factory=dict)
    """The latest report of each engine, by incarnation."""

    def commit(self, num_tokens: int) -> None:
        self.committed += num_tokens
        self.entries.num_generated_tokens += num_tokens

    def commit_group(self, receipt: GroupReceipt) -> None:
        self.commit(sum(t.num_tokens for t in receipt.trajectories))
        entries = self.entries
        entries.num_member_errors += len(receipt.member_errors)
        entries.num_scored += sum(t.reward is not None for t in receipt.trajectories)
        entries.reward_queue_s.append(receipt.reward_queue_s)
        self._count_engine_time(receipt.engine_stats)

    def _count_engine_time(self, stats: EngineStats) -> None:
        before = self.engine_totals.get(stats.incarnation, EngineStats())
        if (stats.elapsed_s, stats.busy_s) > (before.elapsed_s, before.busy_s):
            self.entries.seconds_generate += stats.busy_s - before.busy_s
            self.entries.seconds_observed += stats.elapsed_s - before.elapsed_s
            self.engine_totals[stats.incarnation] = stats

    def discard(self, discards: list[Discard]) -> None:
        self.discarded += sum(d.num_tokens for d in discards)
        self.entries.discards += discards

    def begin_step(self, num_tokens: int) -> None:
        self.in_step = num_tokens

    def end_step(self, *, num_trained: int, num_masked: int) -> None:
        self.in_step = 0
        self.trained += num_trained
        self.masked += num_masked

    def close_entries(self) -> StepEntries:
        """Return the entries for a ledger row and start new ones."""
        closed, self.entries = self.entries, StepEntries()
        return closed

    def imbalance(self, *, num_waiting: int) -> int:
        """Return committed minus everything accounted for; anything but 0 is a bug."""
        consumed = self.trained + self.masked + self.discarded + self.in_step
        return self.committed - consumed - num_waiting
