"""What each step of a run cost, and why: ledger rows, and how long workers held their devices.

    trained, masked, discarded   work on tokens, by what became of them
    waiting                      work on tokens that wait, less that on tokens that waited before
    lost                         a worker had no process, or a driver went on after another
    idle                         a worker had nothing to do
    outside                      before and after training: start, fine-tuning, evaluations

Generation and scoring cost when tokens are committed, and are charged when these are consumed, at
the mean of all that wait. So a step is charged with its row, and its accounts add up to its time.

`workers.jsonl` has a line for each of these events of a worker, in seconds since 1970:

    joined    it is ready for work; its devices are held from the first time on
    died      its process ended; its devices are held while it is started again
    queued    its job ended, and with it the hold on its devices
    started   its next job runs, after a wait in the queue
    left      it ended for good
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from time import time
from typing import Any

from areal_flow.log.ledger_row import OBSERVED, REWARD_TASKS

ROLES = ("generator", "trainer", "reward")
Span = tuple[float, float]


@dataclass(slots=True)
class Tenure:
    """A worker's time in the life of one driver."""

    writer_epoch: int
    role: str
    rate: float
    """What its devices cost a second."""
    present: Span
    """Until infinity while it is there, and if its driver was killed."""
    outages: list[Span] = field(default_factory=list)
    """When its devices were held without a process."""
    in_queue: list[Span] = field(default_factory=list)
    """When its next job waited for devices."""


@dataclass(frozen=True, slots=True)
class Workers:
    tenures: Sequence[Tenure]
    has_prices: bool
    """Without any, costs are device seconds. A device is a GPU, or a core of a worker without."""
    latest: Mapping[int, float]
    """The moment of each driver's last event."""

    def sums(self, epoch: int, value: Callable[[Tenure], float]) -> dict[str, float]:
        """Return the sums of a value over a driver's workers, by role."""
        totals = dict.fromkeys(ROLES, 0.0)
        for tenure in self.tenures:
            totals[tenure.role] += value(tenure) if tenure.writer_epoch == epoch else 0.0
        return totals

    def held(self, epoch: int, within: Span) -> dict[str, float]:
        """Return what a driver's workers cost in a time, by role."""
        return self.sums(
            epoch,
            lambda t: t.rate * (_overlap(t.present, within) - _overlap(within, *t.in_queue)),
        )

    def lost(self, epoch: int, within: Span) -> dict[str, float]:
        """Return the part of that cost during which a worker had no process."""

        def lost_by(tenure: Tenure) -> float:
            held = max(tenure.present[0], within[0]), min(tenure.present[1], within[1])
            return tenure.rate * _overlap(held, *tenure.outages)

        return self.sums(epoch, lost_by)


def _overlap(within: Span, *spans: Span) -> float:
    return sum(max(0.0, min(within[1], end) - max(within[0], begin)) for begin, end in spans)


def record_worker_event(path: Path, writer_epoch: int, event: str, **fields: Any) -> None:
    """Append an event of a worker. A full disk must not end a run, so errors are ignored."""
    with suppress(OSError), path.open("a") as file:
        row = {"at": time(), "writer_epoch": writer_epoch, "event": event, **fields}
        file.write(json.dumps(row) + "\n")


def read_workers(path: Path, prices: Mapping[Any, float]) -> Workers:
    """Return the workers of all drivers; none of a run without the file.

    Args:
        prices: of an hour, by role, else by kind: `gpu`, or `cpu` for a core.
    """
    tenures, latest, rows = dict[Any, Tenure](), dict[int, float](), [*_rows(path)]
    hourly = [prices.get(r["role"], prices.get(("cpu", "gpu")[r["is_gpu"]], 0.0)) for r in rows]
    for row, price in zip(rows, hourly, strict=True):
        at, epoch = row["at"], row["writer_epoch"]
        rate = row["num_devices"] * (price / 3600 if any(hourly) else 1.0)
        new = Tenure(epoch, row["role"], rate, (at, inf))
        tenure = tenures.setdefault((epoch, row["worker"]), new)
        latest[epoch] = at
        for spans in (tenure.outages, tenure.in_queue):
            if spans and spans[-1][1] == inf:
                spans[-1] = spans[-1][0], at
        if row["event"] in ("died", "started"):
            tenure.outages.append((at, inf))
        if row["event"] == "queued":
            tenure.in_queue.append((at, inf))
        if row["event"] == "left":
            tenure.present = tenure.present[0], min(at, tenure.present[1])
    return Workers([*tenures.values()], any(hourly), latest)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.is_file() else ():
        with suppress(ValueError):  # the machine went down before the line was whole
            yield json.loads(line)


CONSUMED = ("trained", "masked", "discarded")
USES = (*CONSUMED, "waiting", "lost", "idle", "outside")
COLUMNS = [
    *("writer_epoch", "committed_at", "step_s", "wait_s", "generate_s"),
    *("read_s", "train_s", "stage_s", "num_waiting_tokens", "metrics"),
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
        began = until - row["step_s"]
        began, since = self._trained.get(epoch, (began, began))
        held, lost = workers.held(epoch, (since, until)), workers.lost(epoch, (since, until))
        is_there = workers.sums(epoch, lambda t: t.present[0] <= until <= t.present[1])
        metrics, seconds = dict(row["metrics"]), max(1e-9, until - since)
        if observed_s := metrics.get(OBSERVED):
            self._generators_busy = row["generate_s"] / observed_s
        # A driver's count of tasks begins at 0.
        before_s = self._reward_s if epoch in self._trained else 0.0
        self._reward_s, self._trained[epoch] = metrics.get(REWARD_TASKS, before_s), (began, until)
        computed_s = row["read_s"] + row["train_s"] + row["stage_s"]
        share = {
            "generator": self._generators_busy,
            "trainer": computed_s / seconds,
            "reward": (self._reward_s - before_s) / seconds / max(1.0, is_there["reward"]),
        }
        busy = {role: min(held[role] * share[role], held[role] - lost[role]) for role in ROLES}
        if lost["trainer"]:  # it was restored then, which is no idleness
            waited = held["trainer"] * row["wait_s"] / seconds
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
