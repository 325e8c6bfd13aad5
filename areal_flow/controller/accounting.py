"""Counts completion tokens, so that committed = trained + masked + discarded + waiting."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_flow.types import Discard, ServedWeights


@dataclass(slots=True)
class StepEntries:
    """What happened since the last ledger row."""

    num_generated_tokens: int = 0
    discards: list[Discard] = field(default_factory=list)
    failed_submissions: list[int] = field(default_factory=list)
    seconds_generate: float = 0.0
    seconds_observed: float = 0.0
    """The time of all generators in which they spent `seconds_generate`."""
    num_member_errors: int = 0
    num_scored: int = 0
    reward_queue_s: list[float] = field(default_factory=list)
    """How long each group that was written waited to be scored."""
    served: list[ServedWeights] = field(default_factory=list)
    """What generators have loaded, each as it was published."""


@dataclass(slots=True)
class TokenAccounting:
    """Totals of the run so far, and the entries of the next ledger row."""

    committed: int = 0
    trained: int = 0
    masked: int = 0
    discarded: int = 0
    in_step: int = 0
    entries: StepEntries = field(default_factory=StepEntries)

    def commit(self, num_tokens: int) -> None:
        self.committed += num_tokens
        self.entries.num_generated_tokens += num_tokens

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
