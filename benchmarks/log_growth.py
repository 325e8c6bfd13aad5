"""How the log's costs grow: commits, files, resume, audit and queries at 10k to 10M trajectories.

Synthetic logs of 1,250 steps are written by the product's own writer. What reads them runs in fresh
processes, whose peak memory is reported with their imports. One step in a hundred is read as a
replay reads it, so that its rows are compared with their hashes.

    python -m benchmarks.log_growth [--sizes 10k 100k 1M 10M] [--steps 1250] [--folder DIR]
        [--json FILE] [--docs docs/benchmarks.md]

A folder keeps the logs, and what writing them took, for the next call.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import psutil

from areal_flow.core.layout import RunLayout
from areal_flow.core.machine import return_freed_memory
from areal_flow.log.audit.run import check_run
from areal_flow.log.browse import GroupSelection, select_groups, show_group
from areal_flow.log.dataset import open_dataset
from areal_flow.log.directory import hold_run
from areal_flow.log.inputs import read_inputs
from areal_flow.log.ledger import read_steps
from areal_flow.log.queries import Run
from areal_flow.log.run_log import RunLog, take_over
from areal_flow.log.trajectories import TrainingRows
from benchmarks import harness
from benchmarks.synthetic_log import LogShape, WrittenLog, make_empty_run, write_log

MARKER = "log_growth tables"
GROUP_SIZES = (16, 8)
SAMPLED_STEPS = 100
"""One step in so many is read and compared with its hashes."""

Row = dict[str, Any]


def number_of(size: str) -> int:
    """Return the number that text such as 10k or 1M stands for."""
    factor = {"k": 1_000, "M": 1_000_000}.get(size[-1])
    return int(size[:-1]) * factor if factor else int(size)


def shape_of(num_rows: int, num_steps: int) -> LogShape:
    """Return a log of about so many rows."""
    batch = max(1, num_rows // num_steps)
    group_size = next((size for size in GROUP_SIZES if batch >= 2 * size), min(batch, 8))
    return LogShape(num_steps, batch // group_size * group_size, group_size)


def write(root: Path, shape: LogShape) -> Row:
    """Write a log; return its files and what its commits took."""
    began = perf_counter()
    layout = make_empty_run(root, shape)
    written = asyncio.run(write_log(layout, shape))
    return {
        "rows": written.num_rows,
        **commit_figures(written),
        **file_figures(layout, written),
        "write_s": perf_counter() - began,
        "peak_gb": harness.peak_gb(),
    }


def commit_figures(written: WrittenLog) -> Row:
    """Return milliseconds of commits at the end of the log, where it has its full size."""
    last = [1000 * seconds for seconds in written.commit_s[-len(written.commit_s) // 5 :]]
    steps = [1000 * seconds for seconds in written.append_s[-len(written.append_s) // 5 :]]
    return {
        "commits": len(written.commit_s),
        "commit_ms": median(last),
        "max_ms": max(last),
        "ledger_ms": median(steps),
    }


def file_figures(layout: RunLayout, written: WrittenLog) -> Row:
    files = [file for file in layout.trajectories.rglob("*") if file.is_file()]
    manifests = [file for file in files if file.suffix == ".manifest"]
    newest = max(manifests, key=lambda file: file.stat().st_mtime_ns)
    return {
        "fragments": len(open_dataset(layout.trajectories).get_fragments()),
        "manifest_kb": newest.stat().st_size / 1e3,
        "versions": len(manifests),
        "disk_over_payload": sum(file.stat().st_size for file in files) / written.payload_bytes,
    }


def resume(root: Path) -> str:
    layout = RunLayout(root)
    with hold_run(layout) as writer:
        take_over(layout, writer)
        log = RunLog(layout, writer)
        waiting, committed = log.read_unconsumed(verifier=read_inputs(layout).verifier)
    return f"{len(waiting)} waiting, {committed.num_tokens} tokens"


def check(root: Path, *, full: bool = False) -> str:
    return_freed_memory()  # as the command does
    return check_run(RunLayout(root), full=full).verdict


def sample(root: Path) -> str:
    """Read every hundredth step's rows, which compares them with their hashes."""
    layout = RunLayout(root)
    steps = read_steps(layout, ["trajectory_ids"])["trajectory_ids"].to_pylist()[1:]
    read_rows = TrainingRows(layout)
    return f"{sum(len(read_rows(ids)) for ids in steps[::SAMPLED_STEPS])} rows"


READINGS: dict[str, Callable[[Path], str]] = {
    "resume": resume,
    "check --full": partial(check, full=True),
    "check again": check,
    "sample": sample,
}
CONDITIONS = ("true", "reward = 1 AND member = 5", "reward = 1 AND staleness = 0")


def draw_curves(run: Run, _: int) -> None:
    from pipelines.pages.view import RunCurves

    RunCurves(run, 0, lambda *_: None).refresh()


def page_of(where: str) -> Callable[[Run, int], object]:
    return lambda run, _: select_groups(run, GroupSelection(where))


QUERIES: dict[str, Callable[[Run, int], object]] = {
    "rows of a step": lambda run, step: run.trajectories("arrow", step=step),
    "ids where step = N": lambda run, step: run.trajectories(
        "arrow", text=True, columns=["trajectory_id", "reward"], where=f"step = {step}"
    ),
    "curves": draw_curves,
    "a group": lambda run, _: show_group(run, 3),
    **{f"page where {where}": page_of(where) for where in CONDITIONS},
    "page of a step": lambda run, step: select_groups(run, GroupSelection(step=step)),
}


def measured(name: str, root: Path) -> Row:
    """Return a reading's seconds, what it read from files, and this process's peak memory."""
    process = psutil.Process()
    began, num_bytes = perf_counter(), process.io_counters().read_chars
    result = READINGS[name](root)
    return {
        "s": perf_counter() - began,
        "read_mb": (process.io_counters().read_chars - num_bytes) / 1e6,
        "peak_gb": harness.peak_gb(),
        "result": result,
    }


def query_seconds(root: Path, step: int) -> Row:
    for module in ("areal_flow.training.step", "pipelines.pages.view"):
        import_module(module)  # else the first query would import torch, the next one Bokeh

    run = Run(root)
    return {name: harness.seconds_of(partial(ask, run, step)) for name, ask in QUERIES.items()}


def in_process(work: Callable[..., Row], *arguments: Any) -> Row:
    (result,) = harness.in_processes(work, [arguments], {"OMP_NUM_THREADS": "1"})
    return result


def written_log(root: Path, shape: LogShape) -> Row:
    """Write a log, unless the folder has it; return what that took."""
    record = root.with_suffix(".json")
    if not record.exists():
        shutil.rmtree(root, ignore_errors=True)
        record.write_text(json.dumps(in_process(write, root, shape)))
    row: Row = json.loads(record.read_text())
    return row


def measure(folder: Path, size: str, num_steps: int) -> dict[str, list[Row]]:
    """Return the rows of one size, by table."""
    root = folder / size
    written = written_log(root, shape_of(number_of(size), num_steps))
    readings = []
    for name in READINGS:
        figures = in_process(measured, name, root)
        rate = written["rows"] / figures["s"]
        readings.append({"size": size, "reading": name, "rows_per_s": rate, **figures})
    return {
        "Writing": [{"size": size, **written}],
        "Reading in a fresh process": readings,
        "Queries, s": [{"size": size, **in_process(query_seconds, root, num_steps // 2)}],
    }


def main() -> None:
    options = {"sizes": ["10k", "100k"], "steps": 1250, "folder": Path, "docs": Path}
    chosen = harness.parse_options(__doc__, **options)
    tables = defaultdict[str, list[Row]](list)
    with tempfile.TemporaryDirectory() as scratch:
        for size in chosen.sizes:
            for title, rows in measure(chosen.folder or Path(scratch), size, chosen.steps).items():
                tables[title] += rows
            harness.report(chosen.json, tables)
    if chosen.docs:
        harness.write_between(chosen.docs, MARKER, harness.markdown(tables))


if __name__ == "__main__":
    main()
