"""What a long run costs its log: appends, space, the driver's memory. Real store, fake engine.

The controller's own flow runs thousands of small steps; prompts, completions and weights are made
up, and a step takes 20 ms. Another process writes the groups, as workers do; this one commits them,
as the driver does. Groups, rows, maintenance and forcing to disk are the real thing. Payload is
what the rows hold in memory as Arrow, both datasets together.

A run that is too long to wait for is sampled: with `--history`, so many earlier steps are written
at once, as maintenance leaves them, in fragments of 1,024 rows. The steps that follow are real.
Take enough of them for old versions, which may take a quarter of the data's bytes, to be as many
as there would be (`versions` stops growing).

    python benchmarks/long_log.py [--steps 10000] [--history 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import lance
import numpy as np
import psutil
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from areal_flow.config import Recipe
from areal_flow.controller.flow import Flow
from areal_flow.controller.flow_setup import FlowBackends, InitialState
from areal_flow.controller.gate import ControllerSettings
from areal_flow.controller.records import Provenance, genesis_row, group_seeds
from areal_flow.controller.schedules import run_async_schedule
from areal_flow.run.lease import Writer, hold_lease
from areal_flow.step_metrics import NOTHING_TRAINED
from areal_flow.store.codec import rollout_table, scored_table
from areal_flow.store.committed import CommittedLogs
from areal_flow.store.ledger import STEPS, Ledger, create_ledger
from areal_flow.store.maintenance import ROWS_PER_FRAGMENT
from areal_flow.store.trajectories import TrajectoryCommitter, create_trajectories, write_groups
from areal_flow.types import (
    Completion,
    EngineStats,
    Episode,
    GroupReceipt,
    PolicyHashes,
    Prompt,
    Score,
    ServedWeights,
    StepRequest,
    StepResult,
    TrajectoryReceipt,
    VersionSpan,
    as_tokens,
    group_id,
    trajectory_id,
)
from areal_flow.workflows.group import RolledOutGroup
from areal_flow.workflows.protocol import TrajectoryDraft

CONTROLLER = ControllerSettings(batch_size=8, group_size=4, max_staleness=2)
CHECKPOINT_EVERY_STEPS = 20
REPORTS = 10
STEP_S = 0.02
PROVENANCE = Provenance(1, "config", "code")


class FakePrompts:
    """One prompt for every submission."""

    def prompt_at(self, submission_index: int) -> Prompt:
        return Prompt("prompt", "1 + 1 =", "2", 1, as_tokens([1, 2, 3]))


class FakeWork:
    """Rollouts that write real groups, a trainer that only counts, weights that are a number."""

    def __init__(self, path: Path, writer: Executor) -> None:
        self._path = path
        self._writer = writer
        self._version = 0
        self._num_tokens: dict[str, int] = {}
        self._templates = _templates(random.Random(0))
        self.payload_bytes = 0

    async def roll_out(self, episode: Episode) -> int:
        return episode.submission_index

    async def write(self, index: int) -> GroupReceipt:
        table, receipts = self.group(index)
        self._num_tokens |= {receipt.trajectory_id: receipt.num_tokens for receipt in receipts}
        loop = asyncio.get_running_loop()
        fragments = await loop.run_in_executor(self._writer, write_groups, self._path, table)
        return GroupReceipt(index, fragments, receipts)

    def group(self, index: int) -> tuple[pa.Table, tuple[TrajectoryReceipt, ...]]:
        """Return the rows of a group, whose bytes count from here on, and their receipts."""
        template, lengths = self._templates[index % len(self._templates)]
        ids = [trajectory_id(index, member) for member in range(len(lengths))]
        spans = [(VersionSpan(self._version, length),) for length in lengths]
        table = _replaced(
            template,
            trajectory_id=ids,
            group_id=[group_id(index)] * len(ids),
            submission_index=[index] * len(ids),
            version_spans=[[span._asdict() for span in of_one] for of_one in spans],
        )
        self.payload_bytes += table.nbytes
        receipts = map(TrajectoryReceipt, ids, spans, [1.0] * len(ids), ["stop"] * len(ids))
        return table, tuple(receipts)

    async def read_ahead(self, trajectory_ids: Sequence[str]) -> None: ...

    async def step(self, request: StepRequest) -> StepResult:
        await asyncio.sleep(STEP_S)
        trained = sum(self._num_tokens.pop(identifier) for identifier in request.trajectory_ids)
        metrics = replace(NOTHING_TRAINED, num_trained_tokens=trained)
        return StepResult(request.step, PolicyHashes(f"w{request.step}", "s"), metrics, "{}")

    async def publish(self, version: int) -> None:
        self._version = version

    async def load_everywhere(self, version: int, served_hash: str) -> list[ServedWeights]:
        return []


def _templates(randomness: random.Random) -> list[tuple[pa.Table, list[int]]]:
    """Return groups to write again and again: workers make them, so here they must be cheap."""
    templates = []
    for index in range(16):
        seeds = group_seeds(0, index, CONTROLLER.group_size)
        prompt = FakePrompts().prompt_at(index)
        episode = Episode(index, prompt, seeds, 0, 1, datetime.now(UTC))
        lengths = [randomness.randint(50, 400) for _ in seeds]
        drafts = [
            TrajectoryDraft(prompt.tokens).with_completion(_completion(randomness, length))
            for length in lengths
        ]
        table = rollout_table(
            [(episode, RolledOutGroup(tuple(enumerate(drafts)), ()))],
            generator="generator-0",
            started_at=datetime.now(UTC),
            engine_stats=EngineStats(),
        )
        scores = [Score(1.0, "right")] * len(drafts)
        templates.append((scored_table(table, scores, verifier="fake@0"), lengths))
    return templates


def _completion(randomness: random.Random, length: int) -> Completion:
    tokens = as_tokens(randomness.choices(range(50_000), k=length))
    logprobs = np.array([randomness.gauss(-1.0, 0.5) for _ in tokens], np.float32)
    return Completion(tokens, logprobs, (VersionSpan(0, length),), "stop")


def _replaced(table: pa.Table, **columns: list[Any]) -> pa.Table:
    for name, values in columns.items():
        field = table.schema.field(name)
        at = table.schema.get_field_index(name)
        table = table.set_column(at, field, pa.array(values, field.type))
    return table


class TimedCommitter(TrajectoryCommitter):
    """The real committer, each commit timed."""

    milliseconds: list[float]

    def commit(self, receipts: Sequence[GroupReceipt]) -> int:
        began = perf_counter()
        head = super().commit(receipts)
        self.milliseconds.append(1e3 * (perf_counter() - began))
        return head


class TimedLedger(Ledger):
    """The real ledger, each append timed."""

    milliseconds: list[float]
    payload_bytes = 0

    def append(self, row: dict[str, Any]) -> None:
        began = perf_counter()
        super().append(row)
        self.milliseconds.append(1e3 * (perf_counter() - began))
        self.payload_bytes += pa.Table.from_pylist([row], schema=STEPS).nbytes


class Reporter:
    """Measures at ten points of the run; forces the logs to disk as checkpoints do."""

    def __init__(
        self,
        root: Path,
        num_steps: int,
        work: FakeWork,
        committer: TimedCommitter,
        ledger: TimedLedger,
    ) -> None:
        self._root, self._num_steps, self._work = root, num_steps, work
        self._committer, self._ledger = committer, ledger
        self.reports: list[dict[str, float]] = []
        self.append_ms: list[float] = []

    async def on_step(self, row: dict[str, Any]) -> None:
        if row["step"] % CHECKPOINT_EVERY_STEPS == 0:
            for dataset in (self._committer, self._ledger):
                await asyncio.to_thread(dataset.maintenance.sync)
        if row["step"] % max(1, self._num_steps // REPORTS) == 0:
            self.reports.append(self._measure(row["step"]))

    def _measure(self, step: int) -> dict[str, float]:
        commits, appends = self._committer.milliseconds, self._ledger.milliseconds
        report = {
            "step": step,
            "commit_median_ms": median(commits),
            "commit_max_ms": max(commits),
            "append_median_ms": median(appends),
            "append_max_ms": max(appends),
            "versions": sum(1 for _ in (self._root / "trajectories.lance/_versions").iterdir()),
            "directory_mb": _bytes_under(self._root) / 1e6,
            "payload_mb": (self._work.payload_bytes + self._ledger.payload_bytes) / 1e6,
            "driver_mb": psutil.Process().memory_info().rss / 1e6,
        }
        self.append_ms += appends
        commits.clear()
        appends.clear()
        return report


def write_history(root: Path, num_steps: int, work: FakeWork, committer: TimedCommitter) -> int:
    """Write steps 1 to `num_steps` at once; return the ledger's payload in bytes."""
    groups_per_step = CONTROLLER.batch_size // CONTROLLER.group_size
    num_together = ROWS_PER_FRAGMENT // CONTROLLER.group_size
    for begin in range(0, num_steps * groups_per_step, num_together):
        indices = range(begin, min(begin + num_together, num_steps * groups_per_step))
        tables, receipts = zip(*map(work.group, indices), strict=True)
        fragments = write_groups(root / "trajectories.lance", pa.concat_tables(tables))
        groups = zip(indices, receipts, strict=True)
        committer.commit([GroupReceipt(index, fragments, of_one) for index, of_one in groups])
    payload_bytes = 0
    for begin in range(1, num_steps + 1, ROWS_PER_FRAGMENT):
        rows = [
            _past_step(step, groups_per_step)
            for step in range(begin, min(begin + ROWS_PER_FRAGMENT, num_steps + 1))
        ]
        table = pa.Table.from_pylist(rows, schema=STEPS)
        lance.write_dataset(table, str(root / "steps.lance"), mode="append")
        payload_bytes += table.nbytes
    return payload_bytes


def _past_step(step: int, groups_per_step: int) -> dict[str, Any]:
    indices = range((step - 1) * groups_per_step, step * groups_per_step)
    members = range(CONTROLLER.group_size)
    return {
        **genesis_row(PolicyHashes(f"w{step}", "s"), provenance=PROVENANCE, numeric_environment=""),
        "step": step,
        "parent_hash": f"w{step - 1}",
        "trajectory_ids": [trajectory_id(index, member) for index in indices for member in members],
    }


def _bytes_under(root: Path) -> int:
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):  # maintenance goes on meanwhile
                total += (Path(folder) / name).stat().st_size
    return total


async def run(
    root: Path, writer: Writer, executor: Executor, num_steps: int, num_past_steps: int
) -> list[dict[str, float]]:
    create_trajectories(root / "trajectories.lance")
    create_ledger(root / "steps.lance")
    committer = TimedCommitter(root / "trajectories.lance", writer)
    committer.milliseconds = []
    work = FakeWork(root / "trajectories.lance", executor)
    genesis = genesis_row(PolicyHashes("w0", "s"), provenance=PROVENANCE, numeric_environment="{}")
    Ledger(root / "steps.lance", writer).append(genesis)
    payload_bytes = write_history(root, num_past_steps, work, committer)
    ledger = TimedLedger(root / "steps.lance", writer)
    ledger.milliseconds, ledger.payload_bytes = [], payload_bytes
    committer.milliseconds.clear()
    await work.publish(num_past_steps)
    logs = CommittedLogs(committer, ledger)
    reporter = Reporter(root, num_steps, work, committer, ledger)
    flow = Flow(
        Recipe(num_steps=num_past_steps + num_steps, controller=CONTROLLER),
        FlowBackends(work, logs, work, work, FakePrompts().prompt_at, reporter.on_step),
        InitialState(
            policy_version=num_past_steps,
            weights_hash=f"w{num_past_steps}",
            next_submission_index=num_past_steps * CONTROLLER.batch_size // CONTROLLER.group_size,
        ),
        PROVENANCE,
        max_running=8,
    )
    await run_async_schedule(flow)
    await flow.close()
    await logs.close()
    reporter.reports[-1]["append_median_of_all_ms"] = median(reporter.append_ms)
    return reporter.reports


def print_reports(reports: Sequence[dict[str, float]]) -> None:
    table = Table(box=None)
    for name in reports[0]:
        table.add_column(name, justify="right")
    for report in reports:
        table.add_row(*(f"{report[name]:,.1f}" for name in reports[0]))
    Console(width=140).print(table)
    last = reports[-1]
    print(f"ledger append, median of all steps = {last['append_median_of_all_ms']:.1f} ms")
    print(f"directory / payload = {last['directory_mb'] / last['payload_mb']:.2f}")
    print(
        f"driver's memory, last / first report = {last['driver_mb'] / reports[0]['driver_mb']:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--history", type=int, default=0, metavar="STEPS")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="areal-flow-long-log-") as scratch:
        root = Path(scratch)
        workers = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        with hold_lease(root / "writers") as writer, workers as executor:
            reports = asyncio.run(run(root, writer, executor, arguments.steps, arguments.history))
    print_reports(reports)
    if arguments.json:
        arguments.json.write_text(json.dumps(reports, indent=2))


if __name__ == "__main__":
    main()
