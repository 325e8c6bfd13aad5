"""Synthetic logs are as real ones; what is written and read grows with rows, not with commits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from areal_flow.core.layout import RunLayout
from areal_flow.log import maintenance
from areal_flow.log.audit.run import check_run
from areal_flow.log.dataset import open_dataset
from areal_flow.log.ledger import read_steps
from areal_flow.log.trajectories import TrainingRows
from benchmarks import log_growth
from benchmarks.synthetic_log import LogShape, WrittenLog, make_empty_run, write_log

pytestmark = pytest.mark.slow


class Log(NamedTuple):
    layout: RunLayout
    written: WrittenLog


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Log, Log]]:
    """Return a log and one four times as long, whose fragments are full at 64 rows at first."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maintenance, "MIN_ROWS_PER_FRAGMENT", 64)
        patch.setattr(maintenance, "FULL_FRAGMENTS", 8)
        patch.setattr(maintenance, "MAX_VERSIONS", 64)
        for num_steps in (20, 80):
            shape = LogShape(num_steps, batch_size=32, group_size=8, max_rows_per_commit=8)
            layout = make_empty_run(tmp_path_factory.mktemp("runs") / "run", shape)
            made.append(Log(layout, asyncio.run(write_log(layout, shape))))
        short, long = made
        yield short, long


def test_synthetic_log_passes_the_audit(logs: tuple[Log, Log]) -> None:
    for layout, written in logs:
        report = check_run(layout)
        assert report.findings == ()
        assert report.checked["trajectories"] == written.num_rows
        assert open_dataset(layout.trajectories).count_rows() == written.num_rows


def test_fragments_and_manifest_stay_small_while_rows_and_commits_quadruple(
    logs: tuple[Log, Log],
) -> None:
    (_, few), (_, many) = logs
    assert len(many.commit_s) > 3.5 * len(few.commit_s)
    short, long = (log_growth.file_figures(*log) for log in logs)
    assert long["fragments"] < 2 * short["fragments"]
    assert long["manifest_kb"] < 2 * short["manifest_kb"]
    assert long["disk_over_payload"] < 1.25 * short["disk_over_payload"]


def test_rows_of_the_newest_step_are_found_by_reading_as_much_in_a_longer_log(
    logs: tuple[Log, Log],
) -> None:
    num_bytes = []
    for layout, _ in logs:
        identifiers = read_steps(layout, ["trajectory_ids"])["trajectory_ids"][-1].as_py()
        read_rows = TrainingRows(layout)
        assert len(read_rows(identifiers)) == 32
        num_bytes.append(read_rows._dataset.io_stats_incremental().read_bytes)
    assert 0 < num_bytes[1] < 2 * num_bytes[0]


def test_a_sample_of_the_rows_is_compared_with_its_hashes(logs: tuple[Log, Log]) -> None:
    assert log_growth.sample(logs[0].layout.root) == "32 rows"


def test_resume_reads_what_followed_the_last_checkpoint_however_long_the_log(
    logs: tuple[Log, Log],
) -> None:
    short, long = (log_growth.measured("resume", log.layout.root) for log in logs)
    assert short["result"] == long["result"] == f"32 waiting, {32 * 64} tokens"
    assert long["read_mb"] < 2 * short["read_mb"]


@pytest.mark.parametrize(
    ("size", "num_rows"), [("10k", 10_000), ("1M", 1_000_000), ("10M", 10_000_000)]
)
def test_sizes_are_those_of_1250_steps(size: str, num_rows: int) -> None:
    shape = log_growth.shape_of(log_growth.number_of(size), 1250)
    assert shape.batch_size * 1250 == num_rows
    assert shape.batch_size % shape.group_size == 0
