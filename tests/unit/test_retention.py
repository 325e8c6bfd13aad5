"""Tokens of old steps may be dropped; what resumes, audits and answers queries stays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import areal_flow
from areal_flow.core.errors import TokensDropped
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.core.types import trajectory_id
from areal_flow.log import maintenance
from areal_flow.log.audit.run import check_run
from areal_flow.log.browse import show_group
from areal_flow.log.codec import DROPPED_COLUMNS
from areal_flow.log.dataset import COMMIT_ORDER, open_dataset
from areal_flow.log.maintenance import Maintenance
from areal_flow.log.retention import Retention
from areal_flow.log.run_log import RunLog
from areal_flow.log.trajectories import TrainingRows
from tests.checkpoints import write_fake_checkpoint
from tests.finished_runs import make_finished_run
from tests.rows import append, commit, written_group

NUM_STEPS = 6


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    """Return a run of six steps with a fragment each, and a waiting group."""
    layout = make_finished_run(tmp_path / "run", num_steps=NUM_STEPS, evaluated=False)
    commit(RunLog(layout, Writer(Path("nobody"), 1)), written_group(layout.trajectories, 50))
    return layout


def drop_tokens(layout: RunLayout, *, until: int, retention: Retention | None = None) -> int:
    keeper = Maintenance(layout.trajectories, num_fragments=0)
    return (retention or Retention(layout)).drop_tokens(keeper, until=until)


def stored(layout: RunLayout) -> dict[str, dict[str, Any]]:
    table = open_dataset(layout.trajectories).to_table(with_row_id=True)
    return {row["trajectory_id"]: row for row in table.to_pylist()}


def ids(*groups: int) -> list[str]:
    return [trajectory_id(group, member) for group in groups for member in range(2)]


def test_rows_of_old_steps_lose_tokens_and_nothing_else(layout: RunLayout) -> None:
    before = stored(layout)
    assert drop_tokens(layout, until=3) == 6
    after = stored(layout)
    assert after.keys() == before.keys()
    old = ids(1, 2, 3)
    for identifier, row in after.items():
        dropped = {name: [] for name in DROPPED_COLUMNS if identifier in old}
        assert row == before[identifier] | dropped
    assert after[old[0]][COMMIT_ORDER] == before[old[0]][COMMIT_ORDER]


def test_row_that_waits_keeps_its_tokens_and_so_does_its_fragment(layout: RunLayout) -> None:
    log = RunLog(layout, Writer(Path("nobody"), 1))
    row = {**log.rows(since=log.head)[0], "trajectory_ids": []}
    append(log, {**row, "step": log.head + 1, "trajectory_watermark": log.watermark})
    assert drop_tokens(layout, until=log.head) == 2 * NUM_STEPS
    assert all(stored(layout)[identifier]["output_tokens"] for identifier in ids(50))


def test_dropped_fragments_are_not_written_again(layout: RunLayout) -> None:
    retention = Retention(layout)
    assert drop_tokens(layout, until=2, retention=retention) == 4
    version = open_dataset(layout.trajectories).version
    assert drop_tokens(layout, until=2, retention=retention) == 0
    assert drop_tokens(layout, until=2) == 0
    assert open_dataset(layout.trajectories).version == version
    assert drop_tokens(layout, until=4, retention=retention) == 4


def test_replay_refuses_dropped_rows_and_names_the_setting(layout: RunLayout) -> None:
    drop_tokens(layout, until=3)
    read_rows = TrainingRows(layout)
    with pytest.raises(TokensDropped, match=r"00000003-0000-00 were dropped: log\.keep_tokens_of"):
        read_rows(ids(3))
    assert [row["trajectory_id"] for row in read_rows(ids(4))] == ids(4)


def test_queries_show_what_is_left(layout: RunLayout) -> None:
    run = areal_flow.open_run(layout.root)
    columns = ["trajectory_id", "num_tokens", "num_trained_tokens", "staleness", "prompt", "step"]
    before = run.trajectories("arrow", text=True, columns=columns).sort_by("trajectory_id")
    drop_tokens(layout, until=3)
    assert run.trajectories("arrow", text=True, columns=columns).sort_by("trajectory_id") == before
    (first, *_), (last, *_) = (
        run.trajectories("arrow", text=True, where=f"step = {step}")["completion"].to_pylist()
        for step in (1, NUM_STEPS)
    )
    assert first is None
    assert last
    old, _ = show_group(run, 1)
    assert old.tokens == ()
    assert old.batch is not None
    assert old.batch.advantage is None
    recent, _ = show_group(run, NUM_STEPS)
    assert len(recent.tokens) == 3


def test_audit_counts_dropped_rows_and_refuses_those_after_the_oldest_checkpoint(
    layout: RunLayout,
) -> None:
    write_fake_checkpoint(layout, 3, weights_hash="w3")
    before = check_run(layout)
    drop_tokens(layout, until=3)
    after = check_run(layout)
    assert after.findings == before.findings
    assert after.checked - before.checked == {"trajectories without tokens": 6}
    drop_tokens(layout, until=4)
    refused = [f.where for f in check_run(layout).findings if f.rule == "tokens-dropped"]
    assert refused == ids(4)


@pytest.mark.parametrize(
    ("keep", "checkpoint", "num_dropped"), [("all", 5, 0), (2, 5, 8), (2, 3, 6), (2, 0, 0)]
)
def test_maintenance_drops_what_neither_the_setting_nor_a_checkpoint_keeps(
    layout: RunLayout,
    keep: Any,
    checkpoint: int,
    num_dropped: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maintenance, "MIN_ROWS_PER_FRAGMENT", 2)  # so that none is merged

    async def maintain() -> None:
        log = RunLog(layout, Writer(Path("nobody"), 1), keep_tokens_of=keep)
        log.tokens_needed_after = checkpoint
        for group in range(100, 150):
            await log.commit([written_group(layout.trajectories, group)])
        await log.close()

    asyncio.run(maintain())
    rows = stored(layout).values()
    assert sum(not row["output_tokens"] for row in rows) == num_dropped
