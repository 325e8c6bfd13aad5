"""What each step of a run cost, and why. Pure: ledger rows, and how long workers were there.

    trained, masked, discarded   work on tokens, by what became of them
    waiting                      work on tokens that wait, less that on tokens that waited before
    lost                         a worker had no process, or a driver went on after another
    idle                         a worker had nothing to do
    outside                      before and after training: start, fine-tuning, evaluations

Generation and scoring cost when tokens are committed, and are charged when these are consumed, at
the mean of all that wait. So a step is charged with its row, and its accounts add up to its time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

from areal_flow.core.workers_file import ROLES, Span, Workers
from areal_flow.log.ledger_row import OBSERVED, REWARD_TASKS

CONSUMED = ("trained", "masked", "discarded")
USES = (*CONSUMED, "waiting", "lost", "idle", "outside")
COLUMNS = [
    *("writer_epoch", "committed_at", "seconds_step", "seconds_wait", "seconds_generate"),
    *("seconds_read", "seconds_train", "seconds_stage", "num_waiting_tokens", "metrics"),
    *(f"num_{use}_tokens" for use in CONSUMED),
]
"""What is read of a ledger row."""
Accounts = defaultdict[tuple[str, str], float]
"""Costs by role and use."""


def by_use(accounts: Accounts) -> dict[str, float]:
    uses = {use: sum(accounts[role, use] for role in ROLES) for use in USES}
    return {**uses, "total": sum(uses.values())}


@dataclass(frozen=True, slots=True)
class StepCost:
    step: int
    accounts: Accounts
    token: Mapping[str, float]
    """By role, of a token that was consumed; the trainer's of a trained or masked one."""


@dataclass(slots=True)
class CostAccounting:
    """Charges one row of the ledger after the other."""

    total: Accounts = field(default_factory=partial(defaultdict, float))
    _in_stock: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ROLES, 0.0))
    """What waiting tokens have cost, by role."""
    _generators_busy: float = 0.0
    _reward_s: float = 0.0
    _trained: dict[int, Span] = field(default_factory=dict)
    """By driver, from when to when it trained."""

    def add(self, row: Mapping[str, Any], workers: Workers) -> StepCost:
        """Charge the ledger's next row, from step 1 on; it has `COLUMNS`."""
        epoch, until = row["writer_epoch"], row["committed_at"].timestamp()
        began = until - row["seconds_step"]
        began, since = self._trained.get(epoch, (began, began))
        held, lost = (of(epoch, (since, until)) for of in (workers.held, workers.lost))
        is_there = workers.sums(epoch, lambda of: of.present[0] <= until <= of.present[1])
        metrics, seconds = dict(row["metrics"]), max(1e-9, until - since)
        if observed_s := metrics.get(OBSERVED):
            self._generators_busy = row["seconds_generate"] / observed_s
        # A driver's count of tasks begins at 0.
        before_s = self._reward_s if epoch in self._trained else 0.0
        self._reward_s, self._trained[epoch] = metrics.get(REWARD_TASKS, before_s), (began, until)
        computed_s = row["seconds_read"] + row["seconds_train"] + row["seconds_stage"]
        share = {
            "generator": self._generators_busy,
            "trainer": computed_s / seconds,
            "reward": (self._reward_s - before_s) / seconds / max(1.0, is_there["reward"]),
        }
        busy = {role: min(held[role] * share[role], held[role] - lost[role]) for role in ROLES}
        if lost["trainer"]:  # it was restored then, which is no idleness
            waited = held["trainer"] * row["seconds_wait"] / seconds
            lost["trainer"] = max(lost["trainer"], held["trainer"] - busy["trainer"] - waited)
        accounts, token = Accounts(float), dict[str, float]()
        for role in ROLES:
            token[role] = self._charge(accounts, role, row, busy[role])
            accounts[role, "lost"] = lost[role]
            accounts[role, "idle"] = held[role] - lost[role] - busy[role]
        for key, cost in accounts.items():
            self.total[key] += cost
        return StepCost(row["step"], accounts, token)

    def whole(self, workers: Workers) -> Accounts:
        """Return the costs of the run so far, steps and all. A driver that was killed has lived
        until its last row, or a later event of its workers."""
        accounts = Accounts(float, self.total)
        for epoch, latest in workers.latest.items():
            first, last = self._trained.get(epoch, (latest, inf))
            before = "outside" if epoch == min(workers.latest) else "lost"
            after = "outside" if epoch == max(workers.latest) else "lost"
            for use, within in ((before, (-inf, first)), (after, (last, latest))):
                for role, cost in workers.held(epoch, within).items():
                    accounts[role, use] += cost
        return accounts

    def _charge(self, accounts: Accounts, role: str, row: Mapping[str, Any], cost: float) -> float:
        """Charge a role's work to tokens; return what each that was consumed cost."""
        is_trainer, before = role == "trainer", self._in_stock[role]
        tokens = {use: row[f"num_{use}_tokens"] for use in CONSUMED[: 2 if is_trainer else 3]}
        number = sum(tokens.values()) + (0 if is_trainer else row["num_waiting_tokens"])
        token = (before + cost) / number if number else 0.0
        accounts |= {(role, use): token * n for use, n in tokens.items()}
        self._in_stock[role] = before + cost - token * sum(tokens.values())
        accounts[role, "waiting"] = self._in_stock[role] - before
        return token
