"""The log on disk: commits, reads, dedup, the ledger's order, what users query."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from lance.optimize import Compaction

import areal_flow
from areal_flow.config import Recipe
from areal_flow.core.errors import RunError, SchemaError, StorageError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.core.types import (
    Discard,
    GroupReceipt,
    PolicyHashes,
    StepMetrics,
    StepRequest,
    StepResult,
)
from areal_flow.log import dataset
from areal_flow.log.codec import TRAJECTORIES, member_errors, receipts
from areal_flow.log.database import empty_database
from areal_flow.log.dataset import create_dataset, open_dataset, storage_errors
from areal_flow.log.directory import create_run
from areal_flow.log.ledger import STEPS, LedgerReader, LedgerTail
from areal_flow.log.ledger_row import Provenance, StepEntries, genesis_row, step_row
from areal_flow.log.maintenance import Maintenance
from areal_flow.log.run_log import RunLog, create_logs
from areal_flow.log.trajectories import (
    TrainingRows,
    validate_groups,
    write_groups,
)
from schemas import EvaluationRow, PromptRow, StepRow, TrajectoryRow, arrow_schema, validate
from tests.rows import append, commit, group_table, written_group

WRITER = Writer(Path("nobody"), 1)
PROVENANCE = Provenance(1, "config", "code")


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """Return a run with empty logs."""
    made = RunLayout(tmp_path / "run")
    create_run(made, Recipe())
    create_logs(made)
    return made


@pytest.fixture
def path(layout: RunLayout) -> Path:
    return layout.trajectories


@pytest.fixture
def log(layout: RunLayout) -> RunLog:
    return RunLog(layout, WRITER)


def ledger_row(step: int, parent: str = "parent") -> dict[str, Any]:
    request = StepRequest(step, parent, step - 1, ("00000000-0000-00",), "digest", 2)
    metrics = StepMetrics(
        loss=0.5,
        grad_norm=1.0,
        learning_rate=1e-4,
        reward_mean=0.5,
        completion_tokens_mean=3.0,
        num_trained_tokens=3,
        num_masked_tokens=0,
        staleness_mean=1.0,
        staleness_max=1,
        masked_fraction_by_decile=(0.0,) * 10,
        read_s=0.1,
        train_s=0.1,
        stage_s=0.1,
        metrics={"clip_fraction": 0.0, "importance_weight_max": 1.5},
    )
    entries = StepEntries(6, [Discard("00000001-0000-00", 3, "stale")], [4], 0.2)
    return step_row(
        request,
        StepResult(step, PolicyHashes(f"w{step}", "s"), metrics, "{}", "p"),
        entries=entries,
        watermark=10,
        next_submission_index=5,
        num_waiting_tokens=0,
        provenance=PROVENANCE,
        wait_s=0.1,
        step_s=0.5,
        num_generators=2,
    )


def test_schemas_have_plain_arrow_types() -> None:
    for model in (TrajectoryRow, StepRow, PromptRow, EvaluationRow):
        schema = arrow_schema(model)
        assert not any("large" in str(field.type) for field in schema)
    spans = TRAJECTORIES.field("version_spans").type
    assert spans.value_type == pa.struct([("version", pa.int32()), ("length", pa.int32())])


def test_a_group_is_seen_once_it_is_committed_and_committed_once_whatever_is_retried(
    layout: RunLayout, path: Path, log: RunLog
) -> None:
    first = written_group(path, 0)
    assert open_dataset(path).count_rows() == 0
    commit(log, first)
    commit(log, first)
    commit(log, written_group(path, 0), written_group(path, 1))
    assert log.watermark == open_dataset(path).count_rows() == 4
    reopened = RunLog(layout, WRITER)
    commit(reopened, written_group(path, 1))
    assert reopened.watermark == open_dataset(path).count_rows() == 4


def test_groups_that_were_written_together_are_committed_together_or_not_at_all(
    path: Path, log: RunLog
) -> None:
    tables = [group_table(index) for index in range(3)]
    fragments = write_groups(path, pa.concat_tables(tables))
    groups = [GroupReceipt(index, fragments, receipts(table)) for index, table in enumerate(tables)]
    with pytest.raises(StorageError, match=r"of 4 rows, those of groups \[0, 1\], found 6"):
        commit(log, *groups[:2])
    assert commit(log, *groups) == 6
    assert commit(log, *groups[1:]) == 6
    assert open_dataset(path).to_table()["submission_index"].to_pylist() == [0, 0, 1, 1, 2, 2]


def test_first_commit_of_a_group_wins_and_groups_lie_in_the_order_given(
    layout: RunLayout, path: Path, log: RunLog
) -> None:
    watermark = commit(log, *(written_group(path, index) for index in (2, 0, 1)))
    assert watermark == 6
    indices = open_dataset(path).to_table()["submission_index"].to_pylist()
    assert indices == [2, 2, 0, 0, 1, 1]
    again = [written_group(path, 0, rewards=(0.5, 0.5)), written_group(path, 5)]
    assert commit(log, *again) == 8
    assert commit(log, *again) == log.watermark == commit(log)
    rows = TrainingRows(layout)(["00000000-0000-00", "00000000-0001-00"])
    assert [row["reward"] for row in rows] == [1.0, 0.0]


@pytest.mark.parametrize("newest_fragments", [1, 2, 64])
def test_reader_returns_the_requested_rows_in_order(
    layout: RunLayout,
    path: Path,
    log: RunLog,
    newest_fragments: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However much of the log it has to search."""
    monkeypatch.setattr(dataset, "NEWEST_FRAGMENTS", newest_fragments)
    commit(log, *(written_group(path, index) for index in range(6)))
    read_rows = TrainingRows(layout)
    assert read_rows(["00000000-0000-00"])
    commit(log, *(written_group(path, index) for index in range(6, 9)))
    ids = [f"{index:08d}-{member:04d}-00" for index in (7, 2, 5) for member in (1, 0)]
    random.Random(0).shuffle(ids)
    rows = read_rows(ids)
    assert [row["trajectory_id"] for row in rows] == ids
    assert [row["reward"] for row in rows] == [0.0 if i.endswith("1-00") else 1.0 for i in ids]
    with pytest.raises(StorageError, match="1 are missing, the first is 00000042-0000-00"):
        read_rows([*ids, "00000042-0000-00"])


def test_time_travel_follows_commits_where_a_compaction_reorders_rows(
    layout: RunLayout, log: RunLog
) -> None:
    for index in range(3):
        commit(log, written_group(layout.trajectories, index))
    watermark = log.watermark
    append(log, {**ledger_row(0), "trajectory_watermark": watermark})
    before_append = lance.dataset(str(layout.trajectories))
    plan = Compaction.plan(before_append, {"target_rows_per_fragment": 64})
    rewritten = [task.execute(before_append) for task in plan.tasks]
    commit(log, written_group(layout.trajectories, 3))
    Compaction.commit(lance.dataset(str(layout.trajectories)), rewritten)
    run = areal_flow.open_run(layout.root)
    scanned = run.trajectories("arrow")["submission_index"].to_pylist()
    assert scanned[0] == 3
    for form in ("polars", "pandas"):
        assert set(run.trajectories(form, at=0)["submission_index"]) == {0, 1, 2}
    relation = run.trajectories("duckdb", at=0, where="member = 1", columns=["submission_index"])
    assert {index for (index,) in relation.fetchall()} == {0, 1, 2}
    with pytest.raises(RunError, match="no step 7 yet"):
        run.trajectories(at=7)


def test_reading_survives_compaction(layout: RunLayout, path: Path, log: RunLog) -> None:
    read_rows = TrainingRows(layout)
    for index in range(20):
        commit(log, written_group(path, index))
        assert len(read_rows(["00000000-0000-00"])) == 1
    Maintenance(path, num_fragments=0).run()
    commit(log, written_group(path, 20))
    assert len(open_dataset(path).get_fragments()) <= 2
    ids = ["00000020-0000-00", "00000003-0001-00"]
    assert [row["trajectory_id"] for row in read_rows(ids)] == ids
    assert log.watermark == 42


def test_dataset_that_is_being_created_is_complete_or_absent(tmp_path: Path) -> None:
    paths = [tmp_path / f"{index}.lance" for index in range(20)]
    with ThreadPoolExecutor(1) as beside:
        creating = [beside.submit(create_dataset, path, STEPS) for path in paths]
        for path, created in zip(paths, creating, strict=True):
            while not path.is_dir() and not created.done():
                pass
            assert open_dataset(path).count_rows() == 0
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_invalid_groups_are_refused_without_printing_tokens() -> None:
    table = group_table(0)
    short = pa.array([[-0.5], [-0.5]], TRAJECTORIES.field("behavior_logprobs").type)
    at = table.schema.get_field_index("behavior_logprobs")
    broken = table.set_column(at, TRAJECTORIES.field("behavior_logprobs"), short)
    with pytest.raises(SchemaError, match="equal lengths") as raised:
        validate_groups(pa.concat_tables([group_table(1), broken]))
    assert "7, 7" not in str(raised.value)
    twice = pa.concat_tables([group_table(0), group_table(0)])
    with pytest.raises(SchemaError, match="trajectory_id"):
        validate_groups(twice)


@pytest.mark.parametrize("column", ["output_tokens", "reward"])
def test_failed_workflow_has_neither_tokens_nor_a_reward(column: str) -> None:
    table = group_table(0, length=0 if column == "reward" else 3, rewards=(None, None))
    if column == "reward":
        rewards = pa.array([None, 1.0])
        table = table.set_column(table.schema.get_field_index("reward"), "reward", rewards)
    at = table.schema.get_field_index("finish_reason")
    failed = table.set_column(at, TRAJECTORIES.field(at), pa.array(["error", "error"]))
    with pytest.raises(SchemaError, match="neither tokens nor a reward"):
        validate_groups(failed)


def test_error_that_is_no_text_leaves_the_log_readable() -> None:
    table = group_table(0, rewards=(None,), error="half a pair: \ud83d")
    with empty_database() as database:
        database.register("log", table)
        ((error,),) = database.sql("SELECT reward_detail->>'error' FROM log").fetchall()
    assert error == "half a pair: ?"


def test_receipts_carry_no_tokens_and_errors_their_cause() -> None:
    table = group_table(3, version=5, rewards=(1.0, None))
    read = receipts(table)
    assert [r.trajectory_id for r in read] == ["00000003-0000-00", "00000003-0001-00"]
    assert [r.num_tokens for r in read] == [3, 3]
    assert [r.newest_version for r in read] == [5, 5]
    assert [r.reward for r in read] == [1.0, None]
    assert member_errors(table) == ("raised",)


def test_ledger_rows_satisfy_their_schema_and_keep_their_order(
    layout: RunLayout, log: RunLog
) -> None:
    genesis = genesis_row(PolicyHashes("w0", "s"), provenance=PROVENANCE, numeric_environment="{}")
    rows = [genesis, ledger_row(1), ledger_row(2)]
    validate(pa.Table.from_pylist(rows, schema=STEPS), StepRow)
    for row in rows:
        append(log, row)
    assert [row["weights_hash"] for row in log.rows()] == ["w0", "w1", "w2"]
    stored = LedgerReader(layout).rows()[1]
    assert stored["discarded"] == [{"trajectory_id": "00000001-0000-00", "reason": "stale"}]
    assert stored["failed_submissions"] == [4]


def test_tail_reads_each_row_once_and_at_first_the_newest(layout: RunLayout, log: RunLog) -> None:
    everything = LedgerTail(layout, ["weights_hash"], since=1)
    newest = LedgerTail(layout, [], since=1, newest=2)
    assert [*everything.batches()] == []
    append(log, *({**ledger_row(1), "step": step} for step in range(4)))
    assert [[row["step"] for row in rows] for rows in everything.batches()] == [[1, 2, 3]]
    assert [[row["step"] for row in rows] for rows in newest.batches()] == [[2, 3]]
    append(log, {**ledger_row(4), "step": 4})
    assert [*everything.batches()] == [[{"step": 4, "weights_hash": "w4"}]]
    assert [*newest.batches()] == [[{"step": 4}]]
    assert [*newest.batches()] == [*everything.batches()] == []


def test_ledger_refuses_null_where_the_schema_does(log: RunLog) -> None:
    with pytest.raises((pa.ArrowInvalid, StorageError, ValueError)):
        append(log, {**ledger_row(0), "weights_hash": None})


def test_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"disk is full.*--resume"), storage_errors(tmp_path):
        raise OSError(28, "No space left on device")


@pytest.fixture
def run(layout: RunLayout, path: Path, log: RunLog) -> areal_flow.Run:
    append(log, {**ledger_row(1), "step": 0})
    commit(log, *(written_group(path, index) for index in range(3)))
    return areal_flow.open_run(layout.root)


def test_run_reads_in_every_format(run: areal_flow.Run) -> None:
    frame = run.trajectories()
    assert isinstance(frame, pd.DataFrame)
    assert str(frame.dtypes["reward"]) == "double[pyarrow]"
    assert frame.groupby("submission_index").reward.mean().tolist() == [0.5] * 3
    assert isinstance(run.trajectories("polars"), pl.DataFrame)
    assert isinstance(run.trajectories("arrow"), pa.Table)
    relation = run.trajectories("duckdb", where="reward = 1", columns=["trajectory_id"])
    assert len(relation.fetchall()) == 3
    assert len(run.trajectories(where="reward = 1 AND submission_index > 0")) == 2
    assert list(run.steps(columns=["step", "loss"]).columns) == ["step", "loss"]
    with pytest.raises(ValueError, match="expected pandas"):
        run.trajectories("excel")  # type: ignore[arg-type]


def test_metrics_of_steps_read_like_columns(run: areal_flow.Run, log: RunLog) -> None:
    """Whatever the algorithm computes, also if two steps computed different metrics."""
    append(log, {**ledger_row(1), "metrics": {"importance_weight_max": 2.5, "entropy": 0.1}})
    table = run.steps("arrow").sort_by("step")
    assert "metrics" not in table.column_names
    assert table["importance_weight_max"].to_pylist() == [None, 2.5]
    assert table["clip_fraction"].to_pylist() == [None, None]
    assert table["entropy"].to_pylist() == [None, 0.1]
    frame = run.steps(columns=["step", "entropy"], where="step = 1")
    assert frame.values.tolist() == [[1, 0.1]]
    with closing(run.database()) as database:
        (row,) = database.sql("SELECT max(importance_weight_max) FROM steps").fetchall()
    assert row == (2.5,)
    with pytest.raises(RunError, match="found entropies"):
        run.steps(columns=["entropies"])
    assert log.rows()[1]["metrics"] == {"importance_weight_max": 2.5, "entropy": 0.1}


def test_run_sees_what_is_committed_while_it_goes_on(
    run: areal_flow.Run, path: Path, log: RunLog
) -> None:
    before = len(run.trajectories())
    commit(log, written_group(path, 77))
    assert len(run.trajectories()) == before + 2


def test_opening_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"config\.toml"):
        areal_flow.open_run(tmp_path)


def test_receipt_is_what_recovery_reads_back(path: Path, log: RunLog) -> None:
    receipt = written_group(path, 4, version=2)
    commit(log, receipt)
    assert receipts(open_dataset(path).to_table()) == receipt.trajectories
    assert replace(receipt, fragments=()).trajectories == receipt.trajectories
