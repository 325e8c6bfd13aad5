"""The content hash of a row depends on its content alone, not on its memory layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from areal_flow.core.errors import StorageError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.log.codec import CONTENT_COLUMNS, TRAJECTORIES, content_hashes
from areal_flow.log.run_log import RunLog, create_logs
from areal_flow.log.trajectories import TrainingRows
from tests.rows import commit, group_table, written_group


def changed(table: pa.Table, column: str) -> pa.Table:
    """Return the rows with a small change in one column of the first row."""
    rows: list[dict[str, Any]] = table.to_pylist()
    value = rows[0][column]
    rows[0][column] = {
        str: lambda: value + "0",
        float: lambda: value + 0.5,
        int: lambda: value + 1,
        list: lambda: value[:-1],
    }.get(type(value), lambda: value)()
    return pa.Table.from_pylist(rows, schema=TRAJECTORIES)


def test_known_rows_have_their_known_hashes() -> None:
    """A log that was sealed by an older version must stay readable."""
    assert content_hashes(group_table(3, version=2)) == [
        "9267e4d36184af2008092aee819534a9",
        "4f120a54c33714745539237c1b5770a9",
    ]


def test_hash_depends_on_the_content_alone() -> None:
    table = group_table(0)
    before = content_hashes(table)
    assert table["content_hash"].to_pylist() == before
    for column in TRAJECTORIES.names:
        hashes = content_hashes(changed(table, column))
        assert (hashes[0] != before[0]) == (column in CONTENT_COLUMNS), column
        assert hashes[1] == before[1]


def test_hash_does_not_depend_on_chunks_and_slices() -> None:
    tables = [group_table(index, length=3 + index, rewards=(1.0, None, 0.0)) for index in range(4)]
    concatenated = pa.concat_tables(tables)
    alone = [text for table in tables for text in content_hashes(table)]
    assert len(set(alone)) == 12
    assert content_hashes(concatenated) == alone
    assert content_hashes(concatenated.combine_chunks()) == alone
    assert content_hashes(concatenated.slice(5, 4)) == alone[5:9]
    assert content_hashes(concatenated.take([7, 2])) == [alone[7], alone[2]]


def test_row_that_was_changed_trains_nothing(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    path = layout.trajectories
    create_logs(layout)
    receipts = [written_group(path, index) for index in range(2)]
    commit(RunLog(layout, Writer(layout.writers, 1)), *receipts)
    ids = [t.trajectory_id for receipt in receipts for t in receipt.trajectories]
    assert [row["reward"] for row in TrainingRows(layout)(ids)] == [1.0, 0.0, 1.0, 0.0]
    lance.dataset(str(path)).update({"reward": "1.0"}, where=f"trajectory_id = '{ids[1]}'")
    with pytest.raises(StorageError, match=f"{ids[1]} is not what was written"):
        TrainingRows(layout)(ids)
