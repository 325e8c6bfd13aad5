"""What all Lance datasets share: creation, opening, fences, maintenance, disk errors.

Rows count unless a driver wrote them after its run was taken over. Each takeover from a live driver
left a fence; a run without fences needs no filter.

A dataset is a directory, or lies in an object store; then a file in place of the directory holds
its URL. Commits are atomic there, too: Lance puts a manifest only if none of that version exists.

Compaction is due after a fixed number of commits. No other commit runs while a compaction commits
its result. A writer that died before its commit leaves data files that no version references; the
next writer removes them.
"""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Literal

import lance
import pyarrow as pa
from lance.fragment import LanceFragment
from lance.optimize import Compaction

from areal_flow.core.durable import force_to_disk
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
CACHE_BYTES = 16 << 20
"""Size of each cache of an open dataset. Lance's default is over a GiB, and appends fill it."""
Log = Literal["trajectories", "steps", "evaluations"]
"""The datasets of a run, as `RunLayout` names them."""

COMMITS_BETWEEN_MAINTENANCE = 50
ROWS_PER_FRAGMENT = 1024
NEWEST_FRAGMENTS = 64
"""Where new rows are looked for first."""
MIN_VERSIONS = 64
"""Minimum number of versions that a cleanup keeps, for readers pinned to them."""


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
    for fragments in portions_from_newest(dataset.get_fragments()):
        newest = fragments + newest
        scanner = dataset.scanner([], filter=where, fragments=fragments, with_row_id=True)
        num_rows -= scanner.count_rows()
        if num_rows <= 0:
            break
    return newest


def portions_from_newest(fragments: list[LanceFragment]) -> Iterator[list[LanceFragment]]:
    """Yield fragments from the newest on, each portion eight times as large as the last."""
    size = NEWEST_FRAGMENTS
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


class Maintenance:
    """Keeps one dataset small, fast and durable.

    `run` and `sync` may run in other threads during commits: `run` opens the dataset itself, since
    a Lance handle refuses other threads while one of them changes it.
    """

    def __init__(self, path: Path, *, num_fragments: int) -> None:
        self._path = path
        self._num_commits = num_fragments
        self._commit_lock = Lock()
        self._synced: set[Path] = set()

    @contextmanager
    def commit(self) -> Iterator[None]:
        with self._commit_lock, storage_errors(self._path):
            yield
        self._num_commits += 1

    @property
    def is_due(self) -> bool:
        return self._num_commits >= COMMITS_BETWEEN_MAINTENANCE

    def run(self) -> None:
        """Merge small fragments and delete old versions; safe during commits and reads.

        Rows are rewritten while others commit. Only committing the result holds the lock, because
        Lance's own retries never win against constant commits.

        Old versions stay, for readers that have them open, until their manifests take a quarter of
        the data's bytes; Lance's defaults would set no such limit. A cleanup reads every manifest
        that it keeps, so it waits until there are a quarter more than that.
        """
        self._num_commits = 0
        dataset = open_dataset(self._path)
        plan = Compaction.plan(dataset, {"target_rows_per_fragment": ROWS_PER_FRAGMENT})
        if rewrites := [task.execute(dataset) for task in plan.tasks]:
            with self._commit_lock:
                Compaction.commit(dataset, rewrites)
        if self._path.is_file():  # listing files in an object store is too slow
            dataset.cleanup_old_versions(retain_versions=MIN_VERSIONS)
            return
        manifest_sizes = list(_file_sizes(self._path / "_versions"))
        data_bytes = sum(_file_sizes(self._path / "data"))
        num_retained = max(MIN_VERSIONS, data_bytes // (4 * max(manifest_sizes, default=1)))
        if len(manifest_sizes) > num_retained * 5 // 4:
            dataset.cleanup_old_versions(retain_versions=num_retained)

    def sync(self) -> None:
        """Force every file to disk that was not forced before; Lance itself never does."""
        present = set()
        for folder, _, names in os.walk(self._path):
            for file in (Path(folder) / name for name in names):
                present.add(file)
                if file not in self._synced:
                    _force_to_disk(file)
            _force_to_disk(Path(folder))
        self._synced = present


def _file_sizes(folder: Path) -> Iterator[int]:
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # a writer renamed or deleted it meanwhile
            yield entry.stat().st_size


def _force_to_disk(path: Path) -> None:
    with suppress(FileNotFoundError):  # a compaction or cleanup deleted it meanwhile
        force_to_disk(path)


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
