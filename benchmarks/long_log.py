"""What a long run costs its log: appends, space, the driver's memory. Real store, fake engine.

The controller's own flow runs thousands of small steps, with prompts, completions and weights made
up; groups, ledger rows, maintenance and forcing to disk are the real thing. Payload is what the
rows hold in memory as Arrow, both datasets together.

    python benchmarks/long_log.py [--steps 10000] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import psutil
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from areal_flow.controller.flow import Flow
from areal_flow.controller.makings import FlowLimits, FlowParts, FlowStart
from areal_flow.controller.records import Provenance, genesis_row
from areal_flow.controller.schedules import run_async_schedule
from areal_flow.store.codec import receipts, rollout_table, scored_table
from areal_flow.store.ledger import STEPS, Ledger, create_ledger
from areal_flow.store.trajectories import TrajectoryCommitter, create_trajectories, write_group
from areal_flow.testing import FakePrompts
from areal_flow.types import (
    NOTHING_TRAINED,
    Completion,
    Episode,
    GroupReceipt,
    LogHead,
    PolicyHashes,
    Score,
    StepRequest,
    StepResult,
    VersionSpan,
)
from areal_flow.writers import Writer, claim_run
from pipelines.assembly import CommittedLedger, CommittedLog

LIMITS = FlowLimits(
    batch_size=8, group_size=4, max_staleness=2, max_running=24, num_steps=0, run_seed=0
)
CHECKPOINT_EVERY_STEPS = 20
REPORTS = 10


class FakeWork:
    """Rollouts that write real groups, a trainer that only counts, weights that are a number."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version = 0
        self._num_tokens: dict[str, int] = {}
        self._randomness = random.Random(0)
        self.payload_bytes = 0

    async def run(self, episode: Episode) -> GroupReceipt:
        completions = [self._completion() for _ in episode.seeds]
        table = rollout_table(
            episode, completions, generator="generator-0", started_at=datetime.now(UTC)
        )
        scored = scored_table(table, [Score(1.0, "right")] * len(completions), verifier="fake@0")
        self.payload_bytes += scored.nbytes
        fragments = await asyncio.to_thread(write_group, self._path, scored)
        found = receipts(scored)
        self._num_tokens |= {receipt.trajectory_id: receipt.num_tokens for receipt in found}
        return GroupReceipt(episode.submission_index, fragments, found)

    def _completion(self) -> Completion:
        length = self._randomness.randint(50, 400)
        tokens = tuple(self._randomness.choices(range(50_000), k=length))
        logprobs = tuple(self._randomness.gauss(-1.0, 0.5) for _ in tokens)
        return Completion(tokens, logprobs, (VersionSpan(self._version, length),), "stop")

    async def step(self, request: StepRequest) -> StepResult:
        trained = sum(self._num_tokens.pop(identifier) for identifier in request.trajectory_ids)
        metrics = replace(NOTHING_TRAINED, num_trained_tokens=trained)
        return StepResult(request.step, PolicyHashes(f"w{request.step}", "o", "s"), metrics, "{}")

    async def publish(self, version: int) -> None:
        self._version = version

    async def load_everywhere(self, version: int) -> None: ...


class TimedLog:
    """The real log, each commit timed; what it gives back is untouched."""

    def __init__(self, committer: TrajectoryCommitter) -> None:
        self._log = CommittedLog(committer)
        self.milliseconds: list[float] = []

    async def commit(self, written: Sequence[GroupReceipt]) -> LogHead:
        began = perf_counter()
        head = await self._log.commit(written)
        self.milliseconds.append(1e3 * (perf_counter() - began))
        return head

    async def close(self) -> None:
        await self._log.close()


class TimedLedger:
    """The real ledger, each append timed."""

    def __init__(self, ledger: Ledger, work: FakeWork) -> None:
        self._ledger = CommittedLedger(ledger)
        self._work = work
        self.milliseconds: list[float] = []

    async def append(self, row: dict[str, Any]) -> None:
        self._work.payload_bytes += pa.Table.from_pylist([row], schema=STEPS).nbytes
        began = perf_counter()
        await self._ledger.append(row)
        self.milliseconds.append(1e3 * (perf_counter() - began))

    async def close(self) -> None:
        await self._ledger.close()


class Reporter:
    """Measures at ten points of the run; forces the logs to disk as checkpoints do."""

    def __init__(
        self,
        root: Path,
        num_steps: int,
        work: FakeWork,
        log: TimedLog,
        ledger: TimedLedger,
        sync: Sequence[Any],
    ) -> None:
        self._root, self._num_steps, self._work = root, num_steps, work
        self._log, self._ledger, self._sync = log, ledger, sync
        self.reports: list[dict[str, float]] = []

    async def on_step(self, row: dict[str, Any]) -> None:
        if row["step"] % CHECKPOINT_EVERY_STEPS == 0:
            for dataset in self._sync:
                await asyncio.to_thread(dataset.sync)
        if row["step"] % max(1, self._num_steps // REPORTS) == 0:
            self.reports.append(self._measure(row["step"]))

    def _measure(self, step: int) -> dict[str, float]:
        commits, appends = self._log.milliseconds, self._ledger.milliseconds
        report = {
            "step": step,
            "commit_median_ms": median(commits),
            "commit_max_ms": max(commits),
            "append_median_ms": median(appends),
            "append_max_ms": max(appends),
            "directory_mb": _bytes_under(self._root) / 1e6,
            "payload_mb": self._work.payload_bytes / 1e6,
            "driver_mb": psutil.Process().memory_info().rss / 1e6,
        }
        commits.clear()
        appends.clear()
        return report


def _bytes_under(root: Path) -> int:
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):  # maintenance goes on meanwhile
                total += (Path(folder) / name).stat().st_size
    return total


async def run(root: Path, writer: Writer, num_steps: int) -> list[dict[str, float]]:
    create_trajectories(root / "trajectories.lance")
    create_ledger(root / "steps.lance")
    committer = TrajectoryCommitter(root / "trajectories.lance", writer)
    ledger = Ledger(root / "steps.lance", writer)
    provenance = Provenance(writer.writer_epoch, "config", "code")
    genesis = genesis_row(
        PolicyHashes("w0", "o", "s"), provenance=provenance, numeric_environment="{}"
    )
    ledger.append(genesis)
    work = FakeWork(root / "trajectories.lance")
    log, timed = TimedLog(committer), TimedLedger(ledger, work)
    reporter = Reporter(root, num_steps, work, log, timed, (committer, ledger))
    flow = Flow(
        replace(LIMITS, num_steps=num_steps),
        FlowParts(FakePrompts(), work, log, timed, work, work, reporter),
        FlowStart(weights_hash="w0"),
        provenance,
    )
    await run_async_schedule(flow)
    await flow.close()
    await log.close()
    await timed.close()
    return reporter.reports


def print_reports(reports: Sequence[dict[str, float]]) -> None:
    table = Table(box=None)
    for name in reports[0]:
        table.add_column(name, justify="right")
    for report in reports:
        table.add_row(*(f"{value:,.1f}" for value in report.values()))
    Console(width=140).print(table)
    last = reports[-1]
    print(f"directory / payload = {last['directory_mb'] / last['payload_mb']:.2f}")
    print(
        f"driver's memory, last / first report = {last['driver_mb'] / reports[0]['driver_mb']:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="areal-flow-long-log-") as scratch:
        root = Path(scratch)
        with claim_run(root / "writers") as writer:
            reports = asyncio.run(run(root, writer, arguments.steps))
    print_reports(reports)
    if arguments.json:
        arguments.json.write_text(json.dumps(reports, indent=2))


if __name__ == "__main__":
    main()
