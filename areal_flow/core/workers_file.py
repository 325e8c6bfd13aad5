"""When each worker of a run was there: `workers.jsonl`, a line for each of these events.

    joined    it is ready for work; its devices are held from the first time on
    died      its process ended; its devices are held while it is started again
    queued    its job ended, and with it the hold on its devices
    started   its next job runs, after a wait in the queue
    left      it ended for good

Moments are in seconds since 1970.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import time
from typing import Any

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

    def sums(self, epoch: int, of: Callable[[Tenure], float]) -> dict[str, float]:
        """Return the sums over a driver's workers, by role."""
        totals = dict.fromkeys(ROLES, 0.0)
        for tenure in self.tenures:
            totals[tenure.role] += of(tenure) if tenure.writer_epoch == epoch else 0.0
        return totals

    def held(self, epoch: int, within: Span) -> dict[str, float]:
        """Return what a driver's workers cost in a time, by role."""
        return self.sums(
            epoch,
            lambda of: of.rate * (_overlap(of.present, within) - _overlap(within, *of.in_queue)),
        )

    def lost(self, epoch: int, within: Span) -> dict[str, float]:
        """Return what those cost meanwhile that had no process."""
        return self.sums(
            epoch, lambda of: of.rate * _overlap(_intersection(of.present, within), *of.outages)
        )


def _intersection(left: Span, right: Span) -> Span:
    return max(left[0], right[0]), min(left[1], right[1])


def _overlap(within: Span, *spans: Span) -> float:
    return sum(max(0.0, min(within[1], end) - max(within[0], begin)) for begin, end in spans)


def record_worker_event(path: Path, writer_epoch: int, event: str, **of: Any) -> None:
    """Append an event of a worker, and what it is and has.

    A full disk must not end a run, so it is passed over.
    """
    with suppress(OSError), path.open("a") as file:
        row = {"at": time(), "writer_epoch": writer_epoch, "event": event, **of}
        file.write(json.dumps(row) + "\n")


def read_workers(path: Path, prices: Mapping[Any, float]) -> Workers:
    """Return the workers of all drivers; none of a run without the file.

    Args:
        prices: of an hour, by role, else by kind: `gpu`, or `cpu` for a core.
    """
    workers, latest, rows = dict[Any, Tenure](), dict[int, float](), [*_rows(path)]
    of_rows = [prices.get(r["role"], prices.get(("cpu", "gpu")[r["is_gpu"]], 0.0)) for r in rows]
    for row, price in zip(rows, of_rows, strict=True):
        at, epoch = row["at"], row["writer_epoch"]
        rate = row["num_devices"] * (price / 3600 if any(of_rows) else 1.0)
        key, new = (epoch, row["worker"]), Tenure(epoch, row["role"], rate, (at, inf))
        known = workers.setdefault(key, new)
        latest[epoch] = at
        for spans in (known.outages, known.in_queue):
            if spans and spans[-1][1] == inf:
                spans[-1] = spans[-1][0], at
        if row["event"] in ("died", "started"):
            known.outages.append((at, inf))
        if row["event"] == "queued":
            known.in_queue.append((at, inf))
        if row["event"] == "left":
            known.present = known.present[0], min(at, known.present[1])
    return Workers([*workers.values()], any(of_rows), latest)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.is_file() else ():
        with suppress(ValueError):  # the machine went down before the line was whole
            yield json.loads(line)
