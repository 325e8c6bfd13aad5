"""What is read of the ledger while a run goes on does not grow with the run."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from lance.dataset import LanceScanner

from areal_flow.cluster import rl_page
from areal_flow.cluster.rl_page import RunFeed
from areal_flow.core.errors import StorageError
from areal_flow.core.layout import RunLayout
from areal_flow.flow.diagnosis import REMEMBERED_STEPS, GapWatch
from areal_flow.log.dataset import create_dataset
from areal_flow.log.ledger import BATCH_ROWS, STEPS, LedgerReader, LedgerTail
from areal_flow.log.queries import Run
from areal_flow.policy.checkpoints import checkpoint_path
from areal_flow.tracking.projection import Projection
from tests.checkpoints import write_fake_checkpoint
from tests.fakes import MemoryTracker
from tests.tracked_runs import append_steps, make_old_run, step_row


@pytest.fixture
def num_rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of rows of each scan of a dataset."""
    numbers: list[int] = []

    def counting(scanner: LanceScanner) -> pa.RecordBatchReader:
        table = read(scanner).read_all()
        numbers.append(len(table))
        return table.to_reader()

    read = LanceScanner.to_reader
    monkeypatch.setattr(LanceScanner, "to_reader", counting)
    return numbers


def of_tracking(layout: RunLayout) -> Callable[[], object]:
    return Projection(layout, MemoryTracker()).deliver


def of_dashboard(layout: RunLayout) -> Callable[[], object]:
    feed = RunFeed(layout, None)  # type: ignore[arg-type]
    return lambda: asyncio.run(feed.shown())


def of_view(layout: RunLayout) -> Callable[[], object]:
    from pipelines.pages.view import RunCurves

    return RunCurves(Run(layout.root), 0, lambda *_: None).refresh


def rewrite_ledger(layout: RunLayout, fragments: list[list[int]]) -> None:
    """Replace a ledger by one of fragments with these steps."""
    shutil.rmtree(layout.steps)
    create_dataset(layout.steps, STEPS)
    for steps in fragments:
        table = pa.Table.from_pylist([*map(step_row, steps)], schema=STEPS)
        lance.write_dataset(table, str(layout.steps), mode="append")


READERS = {"tracking": of_tracking, "/rl": of_dashboard, "view": of_view}


@pytest.mark.parametrize("reader", READERS)
def test_rows_read_at_a_checkpoint_do_not_depend_on_the_age_of_the_run(
    reader: str, tmp_path: Path, num_rows_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rl_page, "UPDATE_EVERY_S", 0.0)
    monkeypatch.setattr(RunFeed, "_at_work", lambda feed: {})
    sums = []
    for age in (20, 1500):
        layout = make_old_run(tmp_path / str(age), num_steps=age)
        read = READERS[reader](layout)
        read()
        append_steps(layout, age + 1)
        write_fake_checkpoint(layout, age + 1, weights_hash=f"w{age + 1}")
        num_rows_read.clear()
        read()
        sums.append(sum(num_rows_read))
    assert sums == [1, 1]


def test_an_old_ledger_is_read_in_batches_each_row_once(tmp_path: Path) -> None:
    num_steps = 3 * BATCH_ROWS
    layout = make_old_run(tmp_path / "r", num_steps=num_steps)
    tail = LedgerTail(layout, ["metrics"], since=1)
    batches = [*tail.batches()]
    assert len(batches) > 1
    assert max(map(len, batches)) < 2 * BATCH_ROWS
    rows = [row for batch in batches for row in batch]
    assert [row["step"] for row in rows] == [*range(1, num_steps + 1)]
    assert rows[1500] == {"step": 1501, "metrics": {"rollout/pass_rate": 0.25 * 1501}}
    assert [*tail.batches()] == []


def test_a_checkpoint_is_described_by_its_row_however_long_ago_that_was_read(
    tmp_path: Path,
) -> None:
    layout = make_old_run(tmp_path / "r", num_steps=40)
    for step in (0, 7, 30):
        write_fake_checkpoint(layout, step, weights_hash=f"w{step}")
    sink = MemoryTracker()
    projection = Projection(layout, sink)
    projection.deliver()
    for step in range(41, 61):
        append_steps(layout, step)
        projection.deliver()
    write_fake_checkpoint(layout, 45, weights_hash="w45")
    write_fake_checkpoint(layout, 50, weights_hash="not the ledger's")
    projection.deliver()
    watermarks = {tags["step"]: tags["trajectories_watermark"] for tags in sink.tags.values()}
    assert watermarks == {"0": "0", "7": "700", "30": "3000", "45": "4500"}
    assert sink.aliases["r"] == checkpoint_path(layout.checkpoints, 45)


def test_a_checkpoint_whose_row_is_not_read_yet_is_registered_later(tmp_path: Path) -> None:
    layout = make_old_run(tmp_path / "r", num_steps=2)
    sink = MemoryTracker()
    projection = Projection(layout, sink)
    write_fake_checkpoint(layout, 3, weights_hash="w3")
    projection.deliver()
    assert sink.versions == {}
    append_steps(layout, 3)
    projection.deliver()
    assert [*sink.versions] == [checkpoint_path(layout.checkpoints, 3)]


def test_engine_gap_is_looked_for_in_the_newest_rows_only(
    tmp_path: Path, num_rows_read: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    layout = make_old_run(tmp_path / "r", num_steps=REMEMBERED_STEPS + 500)
    tail = LedgerTail(layout, ["metrics"], since=1, newest=REMEMBERED_STEPS)
    gap = {"tokens": 500.0, "logprob_difference_mean": 0.2, "kl": 0.03}
    metrics: dict[str, Any] = {f"engine_gap/{name}": value for name, value in gap.items()}
    with caplog.at_level(logging.WARNING):
        GapWatch(lambda: chain.from_iterable(tail.batches())).count(
            {"step": REMEMBERED_STEPS + 500, "metrics": metrics}
        )
    assert "engine and trainer" in caplog.text
    assert max(num_rows_read) == REMEMBERED_STEPS


def test_rows_that_a_compaction_left_behind_newer_ones_are_read_in_order(tmp_path: Path) -> None:
    layout = make_old_run(tmp_path / "r", num_steps=40)
    steps = [3, 4, 0, 2, 1]
    rewrite_ledger(layout, [[step] for step in steps])
    assert [row["step"] for row in LedgerReader(layout).rows([])] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("steps", [[0, 1, 1], [0, 2, 3], [1, 0, 1], [1, 2, 3]])
def test_a_ledger_that_lacks_a_step_or_has_it_twice_is_refused(
    steps: list[int], tmp_path: Path
) -> None:
    layout = make_old_run(tmp_path / "r", num_steps=1)
    rewrite_ledger(layout, [steps])
    with pytest.raises(StorageError, match="each of the steps 0 to 2 once"):
        LedgerReader(layout).rows([])
    rewrite_ledger(layout, [[step] for step in steps])
    with pytest.raises(StorageError, match="each of the steps 0 to 2 once"):
        LedgerReader(layout).rows([])
