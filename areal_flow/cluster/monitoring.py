"""Shows a run to Prometheus, on Dask's page `/metrics` of the driver, next to Dask's own series.

All is read from memory at a scrape; nothing is counted here alone, so totals outlive a resume.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from areal_flow.cluster.control import PoolSnapshot
from areal_flow.cluster.pool import WorkerPool
from areal_flow.core.layout import RunLayout
from areal_flow.core.types import TRAINED_BY_STALENESS
from areal_flow.flow.flow import Flow
from areal_flow.log.ledger import LedgerTail
from areal_flow.tracking.projection import STEP_COLUMNS, step_metrics

MEANING = "See docs/guides/monitoring.md."
PARTS = ("wait", "read", "train", "stage", "step")
Sample = tuple[str, float, Mapping[str, str]]  # a series, its value, its labels


class LedgerTotals:
    """Sums over the ledger's rows, and the newest of them."""

    def __init__(self) -> None:
        self._newest: Mapping[str, Any] = {}
        self._seconds: Counter[str] = Counter()
        self._num_trained: Counter[int] = Counter()  # tokens by staleness

    def add(self, row: Mapping[str, Any]) -> None:
        self._newest = row
        if row["step"]:  # the seconds of the genesis are those of fine-tuning
            self._seconds.update({part: row[f"{part}_s"] for part in PARTS})
        for name, value in row["metrics"].items():
            if name.startswith(TRAINED_BY_STALENESS):
                self._num_trained[int(name.removeprefix(TRAINED_BY_STALENESS))] += int(value)

    def samples(self) -> Iterator[Sample]:
        yield "steps_total", self._newest["step"], {}
        yield "last_step_timestamp_seconds", self._newest["committed_at"].timestamp(), {}
        for part in PARTS:
            yield "step_seconds_total", self._seconds[part], {"part": part}
        for name, value in step_metrics(self._newest).items() if self._newest["step"] else ():
            yield "step_metric", value, {"name": name}

    def staleness(self, run: str) -> Metric:
        counts = [self._num_trained[age] for age in range(max(self._num_trained, default=0) + 1)]
        buckets = [(str(age), below) for age, below in enumerate(accumulate(counts))]
        total = sum(age * count for age, count in enumerate(counts))
        family = HistogramMetricFamily("areal_flow_staleness_versions", MEANING, labels=["run"])
        family.add_metric([run], [*buckets, ("+Inf", sum(counts))], total)
        return family


class RunMetrics(Collector):
    """The series of one run: of its workers, and of its flow and ledger once there is a flow."""

    def __init__(self, layout: RunLayout, pool: WorkerPool) -> None:
        self._layout = layout
        self._pool = pool
        self._flow: Flow | None = None
        self.ledger = LedgerTotals()

    async def follow(self, flow: Flow) -> None:
        """Show a flow from now on; whoever appends to the ledger adds to `self.ledger`, too."""
        await asyncio.to_thread(self._add_recorded)
        self._flow = flow

    def describe(self) -> list[Metric]:
        return []  # so that the registry does not collect all to learn the names

    def collect(self) -> Iterator[Metric]:
        run, families = self._layout.name, dict[str, Metric]()
        for name, value, labels in self._samples():
            base = f"areal_flow_{name.removesuffix('_total')}"
            kind = "counter" if name.endswith("_total") else "gauge"
            family = families.setdefault(base, Metric(base, MEANING, kind))
            family.add_sample(f"areal_flow_{name}", {"run": run, **labels}, value)
        yield from families.values()
        if self._flow is not None:
            yield self.ledger.staleness(run)

    def _add_recorded(self) -> None:
        columns = {*STEP_COLUMNS, *(f"{part}_s" for part in PARTS)}
        for rows in LedgerTail(self._layout, [*columns], since=0).batches():
            for row in rows:
                self.ledger.add(row)

    def _samples(self) -> Iterator[Sample]:
        disk = shutil.disk_usage(self._layout.root)
        yield "disk_size_bytes", disk.total, {}
        yield "disk_free_bytes", disk.free, {}
        yield from _of_workers(PoolSnapshot.of(self._pool))
        if self._flow is not None:
            yield from _of_flow(self._flow)
            yield from self.ledger.samples()


def _of_workers(pool: PoolSnapshot) -> Iterator[Sample]:
    states = Counter((worker.role, worker.state) for worker in pool.workers)
    for role, num_deaths in pool.num_deaths.items():
        states.update({(role, state): 0 for state in ("live", "quarantined")})
        yield "worker_deaths_total", num_deaths, {"role": role}
    for (role, state), number in states.items():
        yield "workers", number, {"role": role, "state": state}
    for worker, engine in pool.engines.items():
        for name, value in engine.items():
            yield f"engine_{name}", value, {"worker": worker}
    for task, (number, seconds) in pool.reward_tasks.items():
        yield "reward_tasks_total", number, {"task": task}
        yield "reward_task_seconds_total", seconds, {"task": task}


def _of_flow(flow: Flow) -> Iterator[Sample]:
    yield "policy_version", flow.policy_version, {}
    for fate in ("committed", "trained", "masked", "discarded"):
        yield f"{fate}_tokens_total", getattr(flow.accounting, fate), {}
    yield "waiting_tokens", flow.buffer.num_waiting_tokens, {}
    gate, settings = flow.gate, flow.recipe.controller
    num_pending = flow.num_pending_groups * settings.group_size
    stages = {
        "generating": gate.running,
        "scoring": num_pending - gate.running,
        "ready": flow.num_ready,
        "training": gate.outstanding - num_pending - flow.num_ready,
    }
    for stage, number in stages.items():
        yield "trajectories", number, {"stage": stage}
    yield "trajectories_limit", (settings.max_staleness + 1) * settings.batch_size, {}
