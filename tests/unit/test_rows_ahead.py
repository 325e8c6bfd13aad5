"""Rows read ahead are those that a step would have read: a wrong or lost hint changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from areal_flow.core.errors import StorageError
from areal_flow.core.layout import RunLayout
from areal_flow.log.trajectories import TrainingRows


class Log(TrainingRows):
    """Rows by id, and which ids were read; it can be damaged, and take its time."""

    def __init__(self) -> None:
        super().__init__(RunLayout(Path()))
        self.reads: list[list[str]] = []
        self.damaged = False
        self.may_read = Event()
        self.may_read.set()
        self.is_read = Event()

    def _read(self, trajectory_ids: Sequence[str]) -> list[dict[str, Any]]:
        self.reads.append(list(trajectory_ids))
        self.is_read.set()
        assert self.may_read.wait(20)
        if self.damaged:
            raise StorageError("not what was written")
        return [{"trajectory_id": identifier} for identifier in trajectory_ids]


def read_ids(rows: TrainingRows, ids: str) -> str:
    return "".join(row["trajectory_id"] for row in rows(ids))


def test_step_reads_only_what_was_not_read_ahead_and_keeps_its_order() -> None:
    log = Log()
    log.read_ahead("abcd")
    assert read_ids(log, "dxbya") == "dxbya"
    assert log.reads == [["a", "b", "c", "d"], ["x", "y"]]


def test_step_without_a_hint_reads_everything() -> None:
    log = Log()
    assert read_ids(log, "ab") == "ab"
    assert read_ids(log, "ab") == "ab", "what a step took is not kept"
    assert log.reads == [["a", "b"]] * 2


def test_at_most_one_batch_is_kept() -> None:
    log = Log()
    log.read_ahead("ab")
    log.read_ahead("bc")
    assert read_ids(log, "abc") == "abc"
    assert log.reads == [["a", "b"], ["b", "c"], ["a"]]


def test_damage_met_while_reading_ahead_is_raised_by_the_step_that_needs_the_row() -> None:
    log = Log()
    log.damaged = True
    with pytest.raises(StorageError):
        log.read_ahead("ab")
    with pytest.raises(StorageError):
        log("ab")
    log.damaged = False
    assert read_ids(log, "ab") == "ab"


def test_step_waits_for_rows_that_are_on_their_way() -> None:
    """The log's handle is one; two threads must not read with it at the same time."""
    log = Log()
    log.may_read.clear()
    with ThreadPoolExecutor(2) as threads:
        ahead = threads.submit(log.read_ahead, "ab")
        assert log.is_read.wait(20)
        step = threads.submit(read_ids, log, "abc")
        assert not step.done()
        log.may_read.set()
        ahead.result()
        assert step.result() == "abc"
    assert log.reads == [["a", "b"], ["c"]]
