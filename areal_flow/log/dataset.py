"""What all Lance datasets share: creation, opening, fences, disk errors, orphaned files.

Rows count unless a driver wrote them after its run was taken over. Each takeover from a live driver
left a fence; a run without fences needs no filter.

A dataset is a directory, or lies in an object store; then a file in place of the directory holds
its URL. Commits are atomic there, too: Lance puts a manifest only if none of that version exists.

A writer that died before its commit leaves data files that no version references; the next writer
removes them.
"""

from __future__ import annotations

import builtins
import errno
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Literal

import lance
import pyarrow as pa
from lance.fragment import LanceFragment

from areal_flow.core.errors import ArealFlowError, RunError, StorageError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import read_fences

if hasattr(builtins, "__IPYTHON__"):  # IPython's `!command` forks only to run a program
    warnings.filterwarnings("ignore", "lance is not fork-safe", UserWarning)
    warnings.filterwarnings("ignore", "IProgress not found")  # tqdm

FORMAT_VERSION = "2.2"
COMMIT_ORDER = "_rowid"
"""Lance's stable row id: 0, 1, 2, ... in the order of commits. A scan may return another order: a
compaction that runs during an append moves older rows behind the newer ones."""
CACHE_BYTES = 4 << 20
"""Size of each cache of an open dataset. Lance's default is over a GiB, and appends fill it."""
BYTES_AT_ONCE, IO_BUFFER_BYTES = 8 << 20, 32 << 20
"""Of Lance's reading. By its defaults a batch of long rows takes three times its size meanwhile."""
NEWEST_FRAGMENTS = 64
"""Where recent rows are looked for first."""
Log = Literal["trajectories", "steps", "evaluations"]
"""The datasets of a run, as `RunLayout` names them."""


def create_dataset(
    path: Path,
    schema: pa.Schema,
    tables: Iterable[pa.Table] = (),
    *,
    stable_row_ids: bool = False,
) -> lance.LanceDataset:
    if path.exists():
        raise RunError(f"{path} already exists")
    staging = path.with_name(f".{path.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    batches = (batch for table in tables for batch in table.cast(schema).to_batches())
    url = _object_store_url(path)
    with storage_errors(path):
        lance.write_dataset(
            pa.RecordBatchReader.from_batches(schema, batches),
            url or str(staging),
            enable_stable_row_ids=stable_row_ids,
            data_storage_version=FORMAT_VERSION,
        )
        if url:
            staging.write_text(url)
        staging.rename(path)
    dataset = open_dataset(path)
    assert dataset.has_stable_row_ids == stable_row_ids
    return dataset


def _object_store_url(path: Path) -> str:
    """Return the object store URL for a new dataset of a run; empty if the run uses none."""
    url_file = RunLayout(path.parent).datasets_url
    return f"{url_file.read_text()}/{path.name}" if url_file.is_file() else ""


def dataset_uri(path: Path) -> str:
    """Return a dataset's directory, or the URL in the file that stands in its place."""
    return path.read_text() if path.is_file() else str(path)


def open_dataset(path: Path) -> lance.LanceDataset:
    if not path.exists():
        raise RunError(f"expected a Lance dataset at {path}, found none")
    session = lance.Session(
        index_cache_size_bytes=CACHE_BYTES, metadata_cache_size_bytes=CACHE_BYTES
    )
    return lance.dataset(dataset_uri(path), session=session)


def has_version(path: Path, version: int) -> bool:
    try:
        lance.dataset(dataset_uri(path), version=version)
    except (OSError, ValueError):
        return False
    return True


def read_rows(
    layout: RunLayout, log: Log, columns: Sequence[str] | None = None, where: str | None = None
) -> pa.Table:
    """Return the rows of a run's dataset that fences admit."""
    names = None if columns is None else list(columns)
    condition = conjunction(where, fence_condition(layout, log))
    return open_dataset(getattr(layout, log)).to_table(columns=names, filter=condition)


def newest_fragments(
    dataset: lance.LanceDataset, where: str | None, *, num_rows: int
) -> list[LanceFragment]:
    """Return as many of the newest fragments as hold these rows, which satisfy a condition."""
    newest: list[LanceFragment] = []
    stored = dataset.get_fragments()
    held = accumulate(fragment.metadata.num_rows for fragment in reversed(stored))
    min_fragments = sum(1 for _ in takewhile(lambda num_held: num_held < num_rows, held)) + 1
    for fragments in portions_from_newest(stored, size=min_fragments):
        newest = fragments + newest
        scanner = dataset.scanner([], filter=where, fragments=fragments, with_row_id=True)
        num_rows -= scanner.count_rows()
        if num_rows <= 0:
            break
    return newest


def portions_from_newest(
    fragments: list[LanceFragment], *, size: int = NEWEST_FRAGMENTS
) -> Iterator[list[LanceFragment]]:
    """Yield fragments from the newest on, each portion eight times as large as the last.

    Compactions keep recent rows at the end, so that most searches end with the first portion.
    """
    while True:
        yield fragments[-size:]
        fragments = fragments[:-size]
        size *= 8
        if not fragments:
            return


def fence_condition(layout: RunLayout, log: Log) -> str | None:
    """Return the filter for the rows that a run's fences admit; None if the run has no fences.

    A fence admits rows of its own writer epoch, of later epochs, and all rows from before it.
    """
    conditions = []
    for fence in read_fences(layout.writers):
        is_earlier = {
            "trajectories": f"{COMMIT_ORDER} < {fence.trajectory_watermark}",
            "steps": f"step <= {fence.step}",
            "evaluations": f"{COMMIT_ORDER} < {fence.evaluation_watermark}",
        }
        conditions.append(f"writer_epoch >= {fence.writer_epoch} OR {is_earlier[log]}")
    return conjunction(*conditions)


def conjunction(*conditions: str | None) -> str | None:
    return " AND ".join(f"({condition})" for condition in conditions if condition) or None


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        is_full = error.errno == errno.ENOSPC or "No space left" in str(error)
        advice = "free some space" if is_full else "check the storage and its permissions"
        reason = "the disk is full" if is_full else str(error)
        raise StorageError(
            f"could not write {path}: {reason}. Everything committed is intact: {advice}, "
            f"then continue with --resume"
        ) from error


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn whatever Lance raises on damaged files into a `StorageError`.

    A Rust panic in Lance arrives as a `BaseException` that is no `Exception`.
    """
    try:
        yield
    except (ArealFlowError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StorageError(f"{path} cannot be read: {cause}") from error


def unreferenced_files(path: Path) -> list[str]:
    """Return data files that no version references; an object store is not searched."""
    if path.is_file():
        return []
    stored = {file.relative_to(path).as_posix() for file in (path / "data").glob("*.lance")}
    with read_errors(path):
        for batch in open_dataset(path).tracked_files():
            rows = zip(batch["path"].to_pylist(), batch["type"].to_pylist(), strict=True)
            stored -= {file for file, kind in rows if kind == "data file"}
    return sorted(stored)


def remove_orphans(path: Path, *, written_before: float) -> int:
    """Remove unreferenced files written before a Unix time; return their number.

    Call it only when all writers from before that time are dead: an unreferenced file of a live
    writer may belong to its next commit.
    """
    num_removed = 0
    for name in unreferenced_files(path):
        with suppress(FileNotFoundError):
            if (path / name).stat().st_mtime < written_before:
                (path / name).unlink()
                num_removed += 1
    return num_removed
