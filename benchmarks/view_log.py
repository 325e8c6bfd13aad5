"""Time of `areal-flow view` with a log of many rows: python -m benchmarks.view_log N."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from timeit import timeit

import numpy as np
import pyarrow as pa

from areal_flow.log.browse import GroupSelection, select_groups, show_group
from areal_flow.log.codec import content_hashes
from areal_flow.log.dataset import create_dataset
from areal_flow.log.ledger import STEPS
from areal_flow.log.queries import Run
from pipelines.pages.view import RunCurves
from tests.finished_runs import make_finished_run
from tests.rows import group_table
from tests.tracked_runs import step_row

GROUP, BATCH, AT_ONCE = 16, 512, 1 << 18


def repeated(row: pa.Table, **columns: pa.Array) -> pa.Table:
    first = pa.array(np.zeros(len(next(iter(columns.values()))), int))
    arrays = {name: row[name].take(first) for name in row.column_names}
    return pa.table(arrays | columns).cast(row.schema)


def portions() -> Iterator[tuple[pa.Table, pa.Table]]:
    for rows in (np.arange(AT_ONCE) + begin for begin in range(0, int(sys.argv[1]), AT_ONCE)):
        ids = pa.array([f"{row // GROUP:08d}-{row % GROUP:04d}-00" for row in rows.tolist()])
        steps, arrays = rows[::BATCH] // BATCH, {"trajectory_id": ids, "prompt_id": ids}
        spans = [[{"version": row // BATCH, "length": 3}] for row in rows.tolist()]
        made = {"submission_index": rows // GROUP, "reward": rows * 7 % 5 < 2, "member": rows % 16}
        arrays |= {name: pa.array(values) for name, values in made.items()}
        log = repeated(group_table(1), version_spans=pa.array(spans), **arrays)
        hashes = [*content_hashes(log.slice(0, BATCH)), *[""] * (AT_ONCE - BATCH)]
        trained = pa.ListArray.from_arrays(np.arange(0, AT_ONCE + 1, BATCH, dtype=np.int32), ids)
        row = pa.Table.from_pylist([step_row(1)], schema=STEPS)
        ledger = {"step": pa.array(steps + 1), "policy_version": pa.array(steps)}
        log = log.drop_columns("content_hash").append_column("content_hash", [hashes])
        yield log, repeated(row, trajectory_ids=trained, **ledger)


with tempfile.TemporaryDirectory() as folder:
    run = Run(make_finished_run(Path(folder) / "big", num_steps=0, evaluated=False).root)
    for place, path in enumerate((run.layout.trajectories, run.layout.steps)):
        shutil.rmtree(path)
        schema, parts = next(portions())[place].schema, (each[place] for each in portions())
        create_dataset(path, schema, parts, stable_row_ids=not place)
    curves = RunCurves(run, 0, lambda *_: None)
    questions = {"curves": curves.refresh, "a group": lambda: show_group(run, 3)}
    for where in (None, "reward = 1 AND member = 5", "reward = 1 AND staleness = 0"):
        questions[f"groups where {where}"] = partial(select_groups, run, GroupSelection(where))
    for what, ask in questions.items():
        print(f"{sys.argv[1]} rows, {what}: {timeit(ask, number=1):.2f} s")
