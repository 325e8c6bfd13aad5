"""What all Lance datasets share: creation, opening, which rows count, maintenance, disk errors.

All rows count but those that a driver wrote after its run was taken over. A run that was never
taken over from a driver that was alive has no fences and needs no condition.

A dataset is a directory, or in an object store, whose address a file in its place has. There, too,
Lance commits a version only if nobody else did: a put that fails if the manifest exists.

Commits are counted; every so many, compaction is due. Nobody else commits while the result of a
compaction is named. A writer that died before its commit leaves data files that no version names:
the next writer removes them.
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
from lance.optimize import Compaction

from areal_flow.core.durable import force_to_disk
from areal_flow.core.errors import ArealFlowError, RunError, StorageError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import read_fences

if hasattr(builtins, "__IPYTHON__"):  # `!command` forks, but only to start another program
    warnings.filterwarnings("ignore", "lance is not fork-safe", UserWarning)
    warnings.filterwarnings("ignore", "IProgress not found")  # tqdm, of bars that nobody needs

FORMAT_VERSION = "2.2"
COMMIT_ORDER = "_rowid"
"""Lance's stable row id: 0, 1, 2, ... as rows were committed. A scan's order is not that: a
compaction beside an append puts its older rows behind the newer ones."""
CACHE_BYTES = 16 << 20
"""What an open dataset may remember. Lance's default is a GiB and more, and appends fill it up."""
Log = Literal["trajectories", "steps", "evaluations"]
"""The datasets of a run, as `RunLayout` names them."""

COMMITS_BETWEEN_ROUNDS = 50
ROWS_PER_FRAGMENT = 1024
LEAST_VERSIONS = 64
"""Versions that stay at least, for readers that are pinned to them."""
_DATA_FILE = "data file"


def create_dataset(
    path: Path,
    schema: pa.Schema,
    tables: Iterable[pa.Table] = (),
    *,
    stable_row_ids: bool = False,
) -> lance.LanceDataset:
    if path.exists():
        raise RunError(f"{path} exists already")
    aside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    batches = (batch for table in tables for batch in table.cast(schema).to_batches())
    url = _url_of_new(path)
    with storage_errors(path):
        lance.write_dataset(
            pa.RecordBatchReader.from_batches(schema, batches),
            url or str(aside),
            enable_stable_row_ids=stable_row_ids,
            data_storage_version=FORMAT_VERSION,
        )
        if url:
            aside.write_text(url)
        aside.rename(path)
    dataset = open_dataset(path)
    assert dataset.has_stable_row_ids == stable_row_ids
    return dataset


def _url_of_new(path: Path) -> str:
    """Return where a run's dataset is to be made in an object store; "" if it is not."""
    named = RunLayout(path.parent).datasets_url
    return f"{named.read_text()}/{path.name}" if named.is_file() else ""


def dataset_uri(path: Path) -> str:
    """Return where a run's dataset is: its directory, or what the file in its place names."""
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
    """Return the rows of a run's dataset that count."""
    names = None if columns is None else list(columns)
    condition = conjunction(where, fence_condition(layout, log))
    return open_dataset(getattr(layout, log)).to_table(columns=names, filter=condition)


def fence_condition(layout: RunLayout, log: Log) -> str | None:
    """Return the condition on the rows of a run's dataset; None where all count.

    A row counts if it is of a fence's epoch or a later one, or was there before the fence.
    """
    conditions = []
    for fence in read_fences(layout.writers):
        before = {
            "trajectories": f"{COMMIT_ORDER} < {fence.trajectory_watermark}",
            "steps": f"step <= {fence.step}",
            "evaluations": f"{COMMIT_ORDER} < {fence.evaluation_watermark}",
        }
        conditions.append(f"writer_epoch >= {fence.writer_epoch} OR {before[log]}")
    return conjunction(*conditions)


def conjunction(*conditions: str | None) -> str | None:
    return " AND ".join(f"({condition})" for condition in conditions if condition) or None


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno == errno.ENOSPC or "No space left" in str(error)
        advice = "free some space" if full else "check the storage and its permissions"
        reason = "the disk is full" if full else str(error)
        raise StorageError(
            f"could not write {path}: {reason}. Everything committed is intact: {advice}, "
            f"then continue with --resume"
        ) from error


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn whatever Lance raises on damaged files into one error; a panic is no `Exception`."""
    try:
        yield
    except (ArealFlowError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StorageError(f"{path} cannot be read: {cause}") from error


class Maintenance:
    """Keeps one dataset small, quick and durable.

    Everything but `commit` may run in other threads beside commits: each opens the dataset itself,
    since a Lance handle refuses other threads while one changes it.
    """

    def __init__(self, path: Path, *, num_fragments: int) -> None:
        self._path = path
        self._num_commits = num_fragments
        self._committing = Lock()
        self._synced: set[Path] = set()

    @contextmanager
    def commit(self) -> Iterator[None]:
        with self._committing, storage_errors(self._path):
            yield
        self._num_commits += 1

    @property
    def is_due(self) -> bool:
        return self._num_commits >= COMMITS_BETWEEN_ROUNDS

    def run(self) -> None:
        """Merge small fragments and drop old versions; safe beside commits and readers.

        Rows are rewritten beside commits; only naming the result holds the writer's lock: Lance's
        own retries lose against constant commits. Manifests may take a quarter of the data's bytes,
        so that readers find the version that they opened; Lance's defaults would let them take
        everything. A cleanup reads every manifest that stays, so it waits until a quarter more are
        there.
        """
        self._num_commits = 0
        dataset = open_dataset(self._path)
        plan = Compaction.plan(dataset, {"target_rows_per_fragment": ROWS_PER_FRAGMENT})
        if rewritten := [task.execute(dataset) for task in plan.tasks]:
            with self._committing:
                Compaction.commit(dataset, rewritten)
        if self._path.is_file():  # listing an object store takes longer than its space is worth
            dataset.cleanup_old_versions(retain_versions=LEAST_VERSIONS)
            return
        manifests = list(_file_sizes(self._path / "_versions"))
        affordable = sum(_file_sizes(self._path / "data")) // (4 * max(manifests, default=1))
        retained = max(LEAST_VERSIONS, affordable)
        if len(manifests) > retained * 5 // 4:
            dataset.cleanup_old_versions(retain_versions=retained)

    def sync(self) -> None:
        """Force every file to disk, each once; Lance itself does not."""
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
        with suppress(FileNotFoundError):  # writers rename and clean up meanwhile
            yield entry.stat().st_size


def _force_to_disk(path: Path) -> None:
    with suppress(FileNotFoundError):  # compaction and cleanup go on meanwhile
        force_to_disk(path)


def unreferenced_files(path: Path) -> list[str]:
    """Return data files that no version names; those in an object store are not looked for."""
    if path.is_file():
        return []
    stored = {file.relative_to(path).as_posix() for file in (path / "data").glob("*.lance")}
    with read_errors(path):
        for batch in open_dataset(path).tracked_files():
            rows = zip(batch["path"].to_pylist(), batch["type"].to_pylist(), strict=True)
            stored -= {file for file, kind in rows if kind == _DATA_FILE}
    return sorted(stored)


def remove_orphans(path: Path, *, written_before: float) -> int:
    """Remove unreferenced files written before a time, in seconds since 1970; return how many.

    Nobody who wrote before it may be alive: a younger file may be in somebody's next commit.
    """
    num_removed = 0
    for name in unreferenced_files(path):
        with suppress(FileNotFoundError):
            if (path / name).stat().st_mtime < written_before:
                (path / name).unlink()
                num_removed += 1
    return num_removed
