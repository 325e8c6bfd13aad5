"""One writer at a time: leases, takeovers, and what a driver that wakes up late cannot do."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from socket import gethostname
from threading import Barrier
from typing import Any

import pytest

import areal_flow
from areal_flow.config import Recipe
from areal_flow.core.errors import RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import (
    Fence,
    Writer,
    hold_lease,
    is_held,
    is_sole_writer,
    newest_lease,
    read_fences,
    record_fence,
)
from areal_flow.core.machine import ALONE, TOGETHER, gpu_lock
from areal_flow.core.types import PolicyHashes
from areal_flow.log.audit.files import Batch, scan
from areal_flow.log.codec import TRAJECTORIES
from areal_flow.log.dataset import fence_condition, open_dataset
from areal_flow.log.directory import create_run
from areal_flow.log.ledger_row import Provenance, genesis_row
from areal_flow.log.run_log import (
    RunLog,
    append_evaluation,
    create_logs,
    read_evaluation,
    take_over,
)
from areal_flow.log.trajectories import TrainingRows
from tests.rows import append, commit, written_group


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    made = RunLayout(tmp_path / "run")
    create_run(made, Recipe())
    create_logs(made)
    return made


def row(step: int, epoch: int, weights_hash: str = "") -> dict[str, Any]:
    genesis = genesis_row(
        PolicyHashes(weights_hash or f"w{step}", "s"),
        provenance=Provenance(epoch, "config", "code"),
        numeric_environment="{}",
    )
    return {**genesis, "step": step}


def test_second_lease_is_refused_and_says_who_holds_the_run(tmp_path: Path) -> None:
    with hold_lease(tmp_path) as writer:
        assert writer.writer_epoch == 1
        message = f"held by process {os.getpid()} on .* since 20.*wait for it, or stop.*--take-over"
        with pytest.raises(RunError, match=message):
            hold_lease(tmp_path).__enter__()
        writer.check_current()
    assert not is_held(tmp_path, 1)
    with hold_lease(tmp_path) as writer:
        assert writer.writer_epoch == 2
        assert is_sole_writer(writer)
        assert [path.name for path in tmp_path.glob(".lease-*")] == []


@pytest.fixture
def nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lock byte ranges as NFS does; they need a file opened in the mode of the lock."""
    flock = fcntl.flock
    lacks = {fcntl.LOCK_EX: os.O_RDONLY, fcntl.LOCK_SH: os.O_WRONLY}

    def lock(file: Any, operation: int) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if mode == lacks[operation & ~fcntl.LOCK_NB]:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock)


@pytest.mark.usefixtures("nfs")
def test_run_and_gpu_can_be_locked_on_nfs(tmp_path: Path) -> None:
    async def take_turn(kind: int) -> None:
        async with asyncio.timeout(2), gpu_lock(tmp_path, kind):
            pass

    with hold_lease(tmp_path) as writer:
        assert is_held(tmp_path, writer.writer_epoch)
    for kind in (ALONE, TOGETHER):
        asyncio.run(take_turn(kind))


def hold(root: Path) -> None:
    with hold_lease(root):
        time.sleep(600)


def test_killed_holder_frees_the_run_and_a_stopped_one_is_named(tmp_path: Path) -> None:
    holder = multiprocessing.get_context("spawn").Process(target=hold, args=(tmp_path,))
    holder.start()
    try:
        while not tmp_path.exists() or newest_lease(tmp_path) is None:
            time.sleep(0.02)
        assert holder.pid
        os.kill(holder.pid, signal.SIGSTOP)
        os.waitpid(holder.pid, os.WUNTRACED)
        with pytest.raises(RunError, match=f"stopped: let it go on with kill -CONT {holder.pid}"):
            hold_lease(tmp_path).__enter__()
        with hold_lease(tmp_path, take_over=True) as writer:
            assert writer.writer_epoch == 2
            assert not is_sole_writer(writer)
    finally:
        holder.kill()
        holder.join()
    assert not is_held(tmp_path, 1)


def test_writer_that_was_taken_over_is_refused(layout: RunLayout) -> None:
    with hold_lease(layout.writers) as stale:
        log = RunLog(layout, stale)
        append(log, row(0, 1))
        with hold_lease(layout.writers, take_over=True) as writer:
            take_over(layout, writer)
            with pytest.raises(RunError, match=f"taken over by process {os.getpid()}"):
                append(log, row(1, 1))
            with pytest.raises(RunError, match="changed nothing since"):
                commit(log, written_group(layout.trajectories, 0))
    assert len(areal_flow.open_run(layout.root).steps("arrow")) == 1
    assert open_dataset(layout.trajectories).count_rows() == 0


class Asleep(Writer):
    """A writer that hangs between its check and its write."""

    def check_current(self) -> None: ...


def test_rows_written_after_a_takeover_are_ignored(layout: RunLayout) -> None:
    stale = Asleep(layout.writers, 1)
    with hold_lease(layout.writers):
        log = RunLog(layout, stale)
        append(log, row(0, 1))
        commit(log, written_group(layout.trajectories, 0))
        with hold_lease(layout.writers, take_over=True) as writer:
            take_over(layout, writer)
            append(log, row(1, 1, "stale"))
            commit(log, *(written_group(layout.trajectories, index) for index in (1, 2)))
            new_log = RunLog(layout, writer)
            assert new_log.head == 0
            new_group = written_group(layout.trajectories, 2, rewards=(0.5, 0.25), writer_epoch=2)
            head = commit(new_log, new_group)
            position = {"trajectory_watermark": head}
            append(new_log, {**row(1, 2, "new"), **position})
            append(log, row(2, 1, "stale"))
    run = areal_flow.open_run(layout.root)
    assert run.steps("arrow").sort_by("step")["weights_hash"].to_pylist() == ["w0", "new"]
    columns = run.trajectories("arrow", columns=["submission_index", "writer_epoch"]).to_pydict()
    pairs = set(zip(columns["submission_index"], columns["writer_epoch"], strict=True))
    assert pairs == {(0, 1), (2, 2)}
    relation = run.trajectories("duckdb", where="member = 0", columns=["submission_index"])
    assert sorted(relation.fetchall()) == [(0,), (2,)]
    assert set(run.trajectories(at=1)["submission_index"]) == {0, 2}
    (read,) = TrainingRows(layout)(["00000002-0000-00"])
    assert read["reward"] == 0.5, "the new driver's, not the stale one's"
    left, committed = new_log.read_unconsumed(verifier="numeric@0")
    assert committed.submission_indices == {0, 2}
    assert {receipt.trajectory_id[:8] for receipt in left} == {"00000000", "00000002"}
    assert [fence.writer_epoch for fence in read_fences(layout.writers)] == [2]


def answers_of(writer_epoch: int, name: str) -> list[dict[str, Any]]:
    named = {"evaluation": name, "held_out": "held_out", "prompt_id": "p", "prompt": "1 + 1 ="}
    answer = {"completion": "2", "answer": "2", "reward": 1.0, "reward_detail": "{}"}
    counts = dict.fromkeys(("policy_version", "difficulty", "num_output_tokens", "sample"), 0)
    written = {"writer_epoch": writer_epoch, "evaluated_at": datetime.now(UTC)}
    rest = {"finish_reason": "stop", "verifier": "numeric@0", "version_spans": []}
    return [{**named, **answer, **counts, **written, **rest}] * 3


@pytest.mark.parametrize("begun_before", [True, False])
def test_evaluations_written_after_a_takeover_are_ignored(
    layout: RunLayout, begun_before: bool
) -> None:
    stale = Asleep(layout.writers, 1)
    with hold_lease(layout.writers) as first:
        append(RunLog(layout, stale), row(0, 1))
        if begun_before:
            append_evaluation(layout, answers_of(1, "before"), first)
        with hold_lease(layout.writers, take_over=True) as writer:
            take_over(layout, writer)
            append_evaluation(layout, answers_of(1, "after"), stale)
            with pytest.raises(RunError, match="taken over"):
                append_evaluation(layout, answers_of(1, "after"), first)
            append_evaluation(layout, answers_of(2, "after"), writer)
            append_evaluation(layout, answers_of(1, "after"), stale)
    expected = [("before", 1)] * 3 * begun_before + [("after", 2)] * 3
    run = areal_flow.open_run(layout.root)
    columns = run.evaluations("arrow", columns=["evaluation", "writer_epoch"]).to_pydict()
    assert list(zip(*columns.values(), strict=True)) == expected
    with run.database() as database:
        counted = database.sql("SELECT evaluation, writer_epoch FROM evaluations").fetchall()
    assert counted == expected
    assert len(read_evaluation(layout, "after")) == 3
    audited = scan(layout.evaluations, fence_condition(layout, "evaluations"))
    assert sum(len(batch.rows) for batch in audited if isinstance(batch, Batch)) == len(expected)


def test_driver_that_was_taken_over_before_it_began_removes_nothing(layout: RunLayout) -> None:
    with hold_lease(layout.writers) as first:
        append(RunLog(layout, first), row(0, 1))
    with hold_lease(layout.writers) as hung, hold_lease(layout.writers, take_over=True) as writer:
        layout.weights_of(writer.writer_epoch).mkdir(parents=True)
        written_group(layout.trajectories, 0)
        with pytest.raises(RunError, match="taken over"):
            take_over(layout, hung)
        take_over(layout, Asleep(layout.writers, hung.writer_epoch))
    assert len(list((layout.trajectories / "data").iterdir())) == 1
    assert layout.weights_of(writer.writer_epoch).is_dir()


def test_driver_that_dies_before_its_fence_leaves_it_to_the_next(layout: RunLayout) -> None:
    stale = Asleep(layout.writers, 1)
    with hold_lease(layout.writers):
        log = RunLog(layout, stale)
        append(log, row(0, 1))
        with hold_lease(layout.writers, take_over=True):
            pass
        with hold_lease(layout.writers) as third:
            take_over(layout, third)
        commit(log, written_group(layout.trajectories, 0))
    assert [fence.writer_epoch for fence in read_fences(layout.writers)] == [3]
    assert len(areal_flow.open_run(layout.root).trajectories("arrow")) == 0


def test_orphans_are_removed_only_when_no_earlier_driver_lives(layout: RunLayout) -> None:
    with hold_lease(layout.writers) as first:
        log = RunLog(layout, first)
        append(log, row(0, 1))
        commit(log, written_group(layout.trajectories, 0))
        written_group(layout.trajectories, 1)
        with hold_lease(layout.writers, take_over=True) as second:
            take_over(layout, second)
            assert len(list((layout.trajectories / "data").iterdir())) == 2
    (layout.checkpoints / ".partial-00000001-1").mkdir(parents=True)
    layout.weights_of(1).mkdir(parents=True)
    time.sleep(0.02)
    with hold_lease(layout.writers) as third:
        layout.weights_of(3).mkdir()
        written_group(layout.trajectories, 2)
        take_over(layout, third)
    files = list((layout.trajectories / "data").iterdir())
    assert len(files) == 2, "the committed one, and the one that is younger than the lease"
    assert open_dataset(layout.trajectories).to_table().cast(TRAJECTORIES).num_rows == 2
    assert list(layout.checkpoints.iterdir()) == []
    assert [path.name for path in layout.weights.iterdir()] == ["00000003"]


def test_lease_says_who_holds_the_run_and_since_when(tmp_path: Path) -> None:
    assert newest_lease(tmp_path) is None
    before = datetime.now(UTC).replace(microsecond=0)
    with hold_lease(tmp_path / "a" / "writers") as writer:
        lease = newest_lease(writer.root)
        assert lease is not None
        assert (lease.writer_epoch, lease.pid, lease.host) == (1, os.getpid(), gethostname())
        assert before <= datetime.fromisoformat(lease.since) <= datetime.now(UTC)
        assert str(lease) == f"process {os.getpid()} on {gethostname()} since {lease.since}"
        assert abs(writer.began_at - time.time()) < 60
    with hold_lease(writer.root), hold_lease(writer.root, take_over=True) as third:
        assert third.writer_epoch == 3
        newest = newest_lease(writer.root)
        assert newest is not None
        assert newest.writer_epoch == 3
        assert not is_sole_writer(third)
    assert is_sole_writer(third)
    assert [path.name for path in sorted(writer.root.iterdir())] == [
        "00000001.lock",
        "00000002.lock",
        "00000003.lock",
    ]


def test_fences_are_read_as_written_oldest_first(tmp_path: Path) -> None:
    assert read_fences(tmp_path) == ()
    for epoch in (12, 3, 7):
        record_fence(tmp_path, Fence(epoch, 10 * epoch, epoch - 1, 2 * epoch))
    assert read_fences(tmp_path) == (
        Fence(3, 30, 2, 6),
        Fence(7, 70, 6, 14),
        Fence(12, 120, 11, 24),
    )
    assert newest_lease(tmp_path) is None, "a fence is no claim"


def test_one_of_many_that_claim_at_once_gets_the_run(tmp_path: Path) -> None:
    """A loser that checked before the winner's claim is refused when it claims."""
    start = Barrier(4)

    def claim(root: Path) -> str:
        start.wait()
        try:
            with hold_lease(root) as writer:
                done.wait()
                return f"epoch {writer.writer_epoch}"
        except RunError as error:
            done.wait()
            return "refused" if "held by process" in str(error) else str(error)

    for attempt in range(8):
        done = Barrier(4, timeout=10)
        with ThreadPoolExecutor(4) as pool:
            outcomes = list(pool.map(claim, [tmp_path / str(attempt)] * 4))
        assert sorted(outcomes) == ["epoch 1", "refused", "refused", "refused"]
        assert [path.name for path in (tmp_path / str(attempt)).iterdir()] == ["00000001.lock"]
