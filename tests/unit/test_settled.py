"""The settled past: a resume that begins at a checkpoint equals one that reads both logs whole."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lance import LanceDataset
from lance.optimize import Compaction

from areal_flow.config import Recipe
from areal_flow.core.errors import RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import hold_lease
from areal_flow.core.types import PolicyHashes, TrajectoryReceipt, submission_index_of
from areal_flow.flow.flow import Flow
from areal_flow.flow.flow_setup import FlowBackends, InitialState
from areal_flow.flow.recovery.plan import PLAN_COLUMNS, plan_initial_state
from areal_flow.flow.schedules import run_async_schedule
from areal_flow.log import dataset
from areal_flow.log.dataset import COMMIT_ORDER, open_dataset
from areal_flow.log.directory import create_run
from areal_flow.log.ledger import STEPS, LedgerReader
from areal_flow.log.ledger_row import CommittedGroups, Provenance, genesis_row
from areal_flow.log.run_log import RunLog, create_logs, take_over
from areal_flow.log.settled import SettledPast, advance, read_past, record_past
from areal_flow.planning.virtual_time import run_in_virtual_time
from tests.flow_fakes import FakeCluster, MemoryLog, flow_recipe, prompt_at
from tests.rows import append, commit, written_group
from tests.tracked_runs import step_row

PROVENANCE = Provenance(1, "", "")
GENESIS = genesis_row(PolicyHashes("w0", ""), provenance=PROVENANCE, numeric_environment="{}")
SPANS = pa.list_(pa.struct([("version", pa.int32()), ("length", pa.int32())]))


def simulated_log(seed: int, *, death_rate: float) -> MemoryLog:
    """Return the logs of a run with late groups, discards and groups given up."""
    log = MemoryLog(rows=[GENESIS])
    cluster = FakeCluster(
        random.Random(seed),
        duration_s=lambda r: r.paretovariate(1.1),
        death_rate=death_rate,
        unscored_rate=0.2,
    )
    recipe = flow_recipe(
        num_steps=12,
        batch_size=8,
        group_size=2,
        max_staleness=1,
        max_attempts=1,
        max_consecutive_failures=99,
    )
    backends = FlowBackends(cluster, log, cluster, cluster, prompt_at, log.on_step)
    flow = Flow(recipe, backends, InitialState(), PROVENANCE, max_running=40)

    async def run_to_end() -> None:
        await run_async_schedule(flow)
        await flow.close()

    run_in_virtual_time(run_to_end())
    return log


def log_table(committed: list[TrajectoryReceipt], orders: list[int], *, since: int) -> pa.Table:
    rows = [
        (order, receipt)
        for order, receipt in zip(orders, committed, strict=False)
        if order >= since
    ]
    return pa.table(
        {
            "trajectory_id": pa.array([r.trajectory_id for _, r in rows], pa.string()),
            "writer_epoch": pa.array([1] * len(rows), pa.int32()),
            "submission_index": pa.array(
                [submission_index_of(r.trajectory_id) for _, r in rows], pa.int64()
            ),
            "version_spans": pa.array(
                [[span._asdict() for span in r.version_spans] for _, r in rows], SPANS
            ),
            COMMIT_ORDER: pa.array([order for order, _ in rows], pa.uint64()),
        }
    )


def planned(past: SettledPast, log: MemoryLog, head: int, orders: list[int]) -> InitialState:
    """Plan from a past and what both logs have since, without the code under test."""
    later = [r for o, r in zip(orders, log.committed, strict=False) if o >= past.watermark]
    named = log.rows[past.ledger_since : head + 1]
    consumed = {identifier for row in named for identifier in row["trajectory_ids"]}
    consumed |= {discard["trajectory_id"] for row in named for discard in row["discarded"]}
    committed = CommittedGroups(
        {submission_index_of(receipt.trajectory_id) for receipt in later},
        sum(receipt.num_tokens for receipt in later),
    )
    unconsumed = [receipt for receipt in later if receipt.trajectory_id not in consumed]
    rows = log.rows[max(0, past.step) : head + 1]
    return plan_initial_state(past, rows, unconsumed, committed, len(log.committed))


@given(
    seed=st.integers(0, 1000),
    death_rate=st.sampled_from([0.0, 0.3]),
    steps=st.sets(st.integers(0, 12), min_size=1, max_size=4),
)
@settings(max_examples=12)
def test_past_in_pieces_is_the_past_at_once_and_plans_what_the_whole_logs_plan(
    seed: int, death_rate: float, steps: set[int]
) -> None:
    log, randomness = simulated_log(seed, death_rate=death_rate), random.Random(seed)
    # Rows of a driver that was taken over count in the order and are not visible.
    orders = list(range(2 * len(log.committed)))
    orders = sorted(randomness.sample(orders, len(log.committed)))
    ledger = pa.Table.from_pylist(log.rows, schema=STEPS)

    def past_of(past: SettledPast, step: int, num_committed: int) -> SettledPast:
        rows = ledger.slice(past.ledger_since, step + 1 - past.ledger_since)
        committed = log_table(log.committed[:num_committed], orders, since=past.watermark)
        places = list(range(len(committed)))
        randomness.shuffle(places)
        return advance(past, rows, committed.take(pa.array(places, pa.int64())))

    past = SettledPast()
    for step in sorted(steps):
        committed_then = log.rows[step]["trajectory_watermark"]
        past = past_of(past, step, randomness.randint(committed_then, len(log.committed)))
        assert past.step == step
        for head in (step, 12):
            assert planned(past, log, head, orders) == planned(SettledPast(), log, head, orders)
    last = past_of(past, 12, len(log.committed))
    assert last == past_of(SettledPast(), 12, len(log.committed))


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return empty_run(tmp_path / "run")


def empty_run(root: Path) -> RunLayout:
    layout = RunLayout(root)
    create_run(layout, Recipe())
    create_logs(layout)
    return layout


class Driver:
    """Commits a group a step and trains it, but for every fifth one, which is trained late."""

    def __init__(self, layout: RunLayout, *, epoch: int = 1) -> None:
        self.layout, self.epoch = layout, epoch
        self.writer = hold_lease(layout.writers, take_over=True)
        self.log = RunLog(layout, self.writer.__enter__())

    def train(self, steps: range, *, name: str = "w") -> None:
        for step in steps:
            group = written_group(self.layout.trajectories, step, writer_epoch=self.epoch)
            watermark = commit(self.log, group)
            groups = [] if step % 5 == 4 else [step]
            groups += [step - 3] if step % 5 == 2 and step > 5 else []
            identifiers = [f"{index:08d}-{m:04d}-00" for index in groups for m in range(2)]
            row = step_row(
                step,
                trajectory_ids=sorted(identifiers),
                trajectory_watermark=watermark,
                next_submission_index=step + 1,
                failed_submissions=[],
                num_generated_tokens=6,
                num_trained_tokens=3 * len(identifiers),
                weights_hash=f"{name}{step}",
                writer_epoch=self.epoch,
            )
            append(self.log, row)


def resumed(layout: RunLayout) -> tuple[SettledPast, InitialState]:
    """Return the past that a resume begins with, and its plan."""
    with hold_lease(layout.writers, take_over=True) as writer:
        log = RunLog(layout, writer)
        unconsumed, committed = log.read_unconsumed(verifier="numeric@0")
        rows = log.rows(PLAN_COLUMNS, since=max(0, log.past.step))
        return log.past, plan_initial_state(log.past, rows, unconsumed, committed, log.watermark)


def assert_planned_as_from_whole_logs(layout: RunLayout, *, step: int) -> None:
    past, plan = resumed(layout)
    assert past.step == step
    layout.settled.unlink(missing_ok=True)
    assert resumed(layout) == (SettledPast(), plan)


def test_resume_after_a_recorded_past_plans_what_both_logs_say(layout: RunLayout) -> None:
    driver = Driver(layout)
    driver.train(range(13))
    driver.log.settle(10)
    assert driver.log.past.watermark == 2 * 9, "the group of step 9 waits until step 12"
    driver.train(range(13, 15))
    assert_planned_as_from_whole_logs(layout, step=10)


def test_rows_hidden_by_a_takeover_are_not_settled(layout: RunLayout) -> None:
    stale = Driver(layout)
    stale.train(range(4))
    with hold_lease(layout.writers, take_over=True) as writer:
        take_over(layout, writer)
    object.__setattr__(stale.log._writer, "root", layout.root / "nobody")  # it hangs in its check
    stale.train(range(4, 6))
    current = Driver(layout, epoch=3)
    current.train(range(4, 9), name="new")
    current.log.settle(7)
    current.train(range(9, 11), name="new")
    assert_planned_as_from_whole_logs(layout, step=7)


def damage(record: Callable[[dict[str, Any]], object]) -> Callable[[RunLayout], object]:
    def write(layout: RunLayout) -> None:
        values = json.loads(layout.settled.read_text())
        record(values)
        layout.settled.write_text(json.dumps(values))

    return write


@pytest.mark.parametrize(
    "change",
    [
        damage(lambda record: record.update(weights_hash="of another driver")),
        damage(lambda record: record.update(writer_epoch=2)),
        damage(lambda record: record.update(step=99)),
        damage(lambda record: record.update(watermark=99)),
        damage(lambda record: record.pop("closed_submissions")),
        damage(lambda record: record.update(unknown=1)),
        lambda layout: layout.settled.write_text("{"),
        lambda layout: layout.settled.unlink(),
    ],
)
def test_past_that_is_not_of_these_logs_is_not_used(
    layout: RunLayout, change: Callable[[RunLayout], object]
) -> None:
    driver = Driver(layout)
    driver.train(range(6))
    driver.log.settle(5)
    change(layout)
    assert read_past(layout, driver.log, num_trajectories=12) == SettledPast()


def test_driver_that_was_taken_over_records_no_past(layout: RunLayout) -> None:
    driver = Driver(layout)
    driver.train(range(3))
    with hold_lease(layout.writers, take_over=True), pytest.raises(RunError, match="taken over"):
        driver.log.settle(2)
    assert not layout.settled.exists()


@contextmanager
def scanned_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collect how many rows the fragments of each scan have."""
    scanned: list[int] = []
    scanner = LanceDataset.scanner

    def count_scanned(self: LanceDataset, *args: Any, **options: Any) -> Any:
        fragments = options.get("fragments") or self.get_fragments()
        scanned.append(sum(fragment.count_rows() for fragment in fragments))
        return scanner(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LanceDataset, "scanner", count_scanned)
        yield scanned


def test_resume_reads_what_follows_its_checkpoint_however_old_the_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "NEWEST_FRAGMENTS", 2)
    read = []
    for num_steps in (25, 45):
        layout = empty_run(tmp_path / f"{num_steps}")
        driver = Driver(layout)
        driver.train(range(num_steps - 2))
        driver.log.settle(num_steps - 3)
        driver.train(range(num_steps - 2, num_steps))
        with scanned_rows(monkeypatch) as scanned:
            past, plan = resumed(layout)
            LedgerReader(layout).row(num_steps - 3, ["weights_hash"])
        assert past.step == num_steps - 3
        assert plan.watermark == 2 * num_steps
        read.append(sum(scanned))
    assert read[0] == read[1] > 0


def test_new_rows_are_found_where_a_compaction_put_them_before_older_ones(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "NEWEST_FRAGMENTS", 1)
    driver = Driver(layout)
    driver.train(range(10))
    driver.log.settle(8)
    before_append = open_dataset(layout.trajectories)
    plan = Compaction.plan(before_append, {"target_rows_per_fragment": 64})
    rewritten = [task.execute(before_append) for task in plan.tasks]
    driver.train(range(10, 12))
    Compaction.commit(open_dataset(layout.trajectories), rewritten)
    newest = open_dataset(layout.trajectories).get_fragments()[-1]
    assert newest.count_rows() == 20, "the oldest rows lie last"
    assert_planned_as_from_whole_logs(layout, step=8)


def test_recorded_past_is_read_as_it_was_written(layout: RunLayout) -> None:
    driver = Driver(layout)
    driver.train(range(10))
    driver.log.settle(9)
    past = driver.log.past
    record_past(layout, past)
    assert read_past(layout, driver.log, num_trajectories=20) == past
    assert past.closed_submissions == ()
    assert past.next_open_submission == 9
