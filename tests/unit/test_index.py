"""The index of trajectories: what queries answer from it is what the logs say."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from areal_flow.config import Recipe
from areal_flow.core.errors import RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import hold_lease
from areal_flow.log import index, queries, run_log
from areal_flow.log.directory import create_run
from areal_flow.log.index import INDEXED, LEFT_OUT, Index, read_index
from areal_flow.log.queries import Run
from areal_flow.log.run_log import RunLog, create_logs, take_over
from pipelines.tiny_jobs.tiny_policy import write_tiny_model
from tests.rows import append, commit, written_group
from tests.tracked_runs import step_row


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "run")
    create_run(layout, Recipe())
    write_tiny_model(layout.model, max_model_len=32)
    create_logs(layout)
    return layout


class Driver:
    """Commits a group a step; every fifth is trained later, every seventh discarded."""

    def __init__(self, layout: RunLayout, *, epoch: int = 1) -> None:
        self.layout, self.epoch = layout, epoch
        self.lease = hold_lease(layout.writers, take_over=True)
        self.log = RunLog(layout, self.lease.__enter__())

    def train(self, steps: range, *, name: str = "w") -> None:
        for step in steps:
            rewards = (step % 3, None) if step % 4 == 0 else (1.0, 0.0)
            version = max(0, step - 1 - step % 2)
            group = written_group(
                self.layout.trajectories,
                *(step,),
                version=version,
                rewards=rewards,
                writer_epoch=self.epoch,
            )
            watermark = commit(self.log, group)
            groups = [] if step % 5 == 4 or step % 7 == 6 else [step]
            groups += [step - 3] if step % 5 == 2 and step > 5 and (step - 3) % 7 != 6 else []
            discarded = [step - 1] if step % 7 == 0 and step else []
            row = step_row(
                step,
                policy_version=max(0, step - 1),
                trajectory_ids=ids(groups),
                importance_weight_means=[0.5 + step] * 2 * len(groups),
                importance_weight_maxima=[None] * 2 * len(groups),
                discarded=[{"trajectory_id": i, "reason": "stale"} for i in ids(discarded)],
                trajectory_watermark=watermark,
                weights_hash=f"{name}{step}",
                writer_epoch=self.epoch,
            )
            append(self.log, row)


def ids(groups: list[int]) -> list[str]:
    return sorted(f"{group:08d}-{member:04d}-00" for group in groups for member in range(2))


def assert_index_says_what_the_logs_say(layout: RunLayout) -> None:
    run = Run(layout.root)
    from_index = run.indexed().sql("FROM indexed ORDER BY trajectory_id").to_arrow_table()
    head = int(run.steps().step.max())
    from_logs = run.database(at=head).sql(f"{INDEXED} ORDER BY trajectory_id").to_arrow_table()
    assert len(from_index) == len(from_logs) > 0
    assert from_index.select(from_logs.column_names).to_pylist() == from_logs.to_pylist()
    assert {*from_index.column_names} == {*from_logs.column_names, "commit_order"}
    assert not {*LEFT_OUT}.intersection(from_index.column_names)


def test_index_in_pieces_says_what_the_logs_say_and_its_files_are_few(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "ROWS_AT_ONCE", 8)
    monkeypatch.setattr(index, "MAX_MERGED_ROWS", 32)
    driver, begin = Driver(layout), 0
    for end in (3, 4, 9, 10, 11, 17, 30, 31, 45, 46, 60):
        driver.train(range(begin, end))
        assert_index_says_what_the_logs_say(layout)
        driver.log.settle(end - 1 - end % 2)
        assert_index_says_what_the_logs_say(layout)
        begin = end
    parts = read_index(layout).parts
    sizes = [int(part.split("-")[1]) for part in parts]
    assert sum(sizes) == driver.log.past.watermark > 100
    assert max(sizes) <= 32
    assert len(parts) <= 8, "files are merged as their rows double"
    assert {*parts} <= {file.name for file in layout.index.glob("*.parquet")}
    assert len([*layout.index.glob("*.parquet")]) <= 2 * len(parts)


def test_rows_that_a_takeover_hides_are_not_in_the_index(layout: RunLayout) -> None:
    stale = Driver(layout)
    stale.train(range(9))
    with hold_lease(layout.writers, take_over=True) as writer:
        take_over(layout, writer)
    object.__setattr__(stale.log._writer, "root", layout.root / "nobody")  # it hangs in its check
    stale.train(range(9, 12))
    stale.log.settle(11)
    assert read_index(layout).past.step == 8
    assert_index_says_what_the_logs_say(layout)
    current = Driver(layout, epoch=3)
    current.train(range(9, 16), name="new")
    current.log.settle(14)
    assert read_index(layout).past.step == 14
    assert_index_says_what_the_logs_say(layout)


def of_another_driver(layout: RunLayout) -> None:
    record = json.loads(layout.index_parts.read_text())
    record["past"]["weights_hash"] = "of another driver"
    layout.index_parts.write_text(json.dumps(record))


def damaged(**changes: Any) -> Callable[[RunLayout], object]:
    def write(layout: RunLayout) -> None:
        record = json.loads(layout.index_parts.read_text())
        layout.index_parts.write_text(json.dumps(record | changes))

    return write


@pytest.mark.parametrize(
    "damage",
    [
        of_another_driver,
        damaged(version=0),
        damaged(past=None),
        damaged(parts=["1-2-3.parquet"]),
        lambda layout: layout.index_parts.write_text("{"),
        lambda layout: layout.index_parts.unlink(),
        lambda layout: (layout.index / read_index(layout).parts[0]).unlink(),
    ],
)
def test_index_that_is_damaged_is_not_used_and_made_again(
    layout: RunLayout, damage: Callable[[RunLayout], object]
) -> None:
    driver = Driver(layout)
    driver.train(range(9))
    driver.log.settle(8)
    assert read_index(layout).parts
    damage(layout)
    assert read_index(layout) == Index()
    assert_index_says_what_the_logs_say(layout)
    driver.train(range(9, 13))
    driver.log.settle(12)
    assert read_index(layout).past == driver.log.past
    assert_index_says_what_the_logs_say(layout)


@pytest.mark.parametrize("failing", ["record_past", "extend_index"])
def test_a_full_disk_ends_no_run_at_its_checkpoint(
    layout: RunLayout,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failing: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    driver = Driver(layout)
    driver.train(range(5))
    monkeypatch.setattr(run_log, failing, fail)
    with caplog.at_level(logging.WARNING):
        driver.log.settle(4)
    assert "will read more of the log: [Errno 28] No space left on device" in caplog.text
    monkeypatch.undo()
    driver.train(range(5, 9))
    driver.log.settle(8)
    assert read_index(layout).past == driver.log.past
    assert_index_says_what_the_logs_say(layout)


@pytest.fixture
def run(layout: RunLayout) -> Run:
    driver = Driver(layout)
    driver.train(range(20))
    driver.log.settle(15)
    driver.train(range(20, 23))
    return Run(layout.root)


QUESTIONS: list[dict[str, Any]] = [
    {"where": "reward = 1"},
    {"where": "status = 'discarded'", "columns": ["trajectory_id", "reason", "step"]},
    {"where": "step BETWEEN 3 AND 21", "columns": ["trajectory_id", "completion", "staleness"]},
    {"where": "completion <> '' AND step = 7"},
    {"columns": ["trajectory_id", "importance_weight_mean", "passed"]},
    {"where": "status = 'nothing'"},
]


@pytest.mark.parametrize("limit", [0, 10_000])
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: str(question.get("where")))
def test_questions_are_answered_as_by_the_whole_log(
    run: Run, monkeypatch: pytest.MonkeyPatch, question: dict[str, Any], limit: int
) -> None:
    monkeypatch.setattr(queries, "MAX_ROWS_IN_MEMORY", limit)
    for kind in ("arrow", "duckdb"):
        answer = rows_of(run.trajectories(kind, text=True, **question))
        assert answer == rows_of(run.trajectories(kind, text=True, at=22, **question))
    assert bool(answer) == (question.get("where") != "status = 'nothing'")


def rows_of(table: Any) -> list[dict[str, Any]]:
    table = table if isinstance(table, pa.Table) else table.to_arrow_table()
    rows: list[dict[str, Any]] = table.sort_by("trajectory_id").to_pylist()
    return rows


@pytest.mark.parametrize("step", [0, 5, 7, 12, 22])
def test_rows_of_a_step_are_those_that_it_trained_or_discarded(run: Run, step: int) -> None:
    of_step = run.trajectories("arrow", step=step, text=True)
    assert rows_of(of_step) == rows_of(
        run.trajectories("arrow", text=True, at=22, where=f"step = {step}")
    )
    stored = run.trajectories("arrow", step=step)
    assert stored.schema.names == run.trajectories("arrow").schema.names
    assert sorted(stored["trajectory_id"].to_pylist()) == [
        row["trajectory_id"] for row in rows_of(of_step)
    ]
    good = run.trajectories(step=step, where="reward = 1", columns=["trajectory_id", "reward"])
    assert set(good.columns) == {"trajectory_id", "reward"}
    assert len(good) == sum(row["reward"] == 1 for row in rows_of(of_step))


def test_a_step_that_there_is_not_is_reported(run: Run) -> None:
    with pytest.raises(RunError, match="run has no step 23 yet"):
        run.trajectories(step=23)
    with pytest.raises(RunError, match=r"expected columns and a condition.*colour"):
        run.trajectories(step=3, columns=["colour"])
