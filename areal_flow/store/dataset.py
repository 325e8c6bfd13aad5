"""What all Lance datasets share: creation, opening, which rows count, durability, clear errors.

All rows count but those that a driver wrote after its run was taken over. A run that was never
taken over from a driver that was alive has no fences and needs no condition.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

import lance
import pyarrow as pa
from lance.optimize import Compaction

from areal_flow.durable import force_to_disk
from areal_flow.errors import ArealFlowError, RunError, StorageError
from areal_flow.recovery.lease import read_fences

FORMAT_VERSION = "2.2"
ROWS_PER_FRAGMENT = 1024
COMMIT_ORDER = "_rowid"
"""Lance's stable row id: 0, 1, 2, ... as rows were committed. A scan's order is not that: a
compaction beside an append puts its older rows behind the newer ones."""
CACHE_BYTES = 16 << 20
"""What an open dataset may remember. Lance's default is a GiB and more, and appends fill it up."""
LEAST_VERSIONS = 64
"""Versions that stay at least, for readers that are pinned to them."""


def create_dataset(
    path: Path, schema: pa.Schema, *, stable_row_ids: bool = False
) -> lance.LanceDataset:
    """Create an empty dataset: whoever looks finds none, or a whole one.

    Args:
        stable_row_ids: number rows in the order of their commits (`COMMIT_ORDER`). Each commit then
            costs every later manifest some 25 bytes.

    Raises:
        RunError: something is there already.
        StorageError: the disk refused.
    """
    if path.exists():
        raise RunError(f"{path} exists already")
    aside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    with storage_errors(path):
        lance.write_dataset(
            schema.empty_table(),
            str(aside),
            schema=schema,
            enable_stable_row_ids=stable_row_ids,
            data_storage_version=FORMAT_VERSION,
        )
        aside.rename(path)
    dataset = open_dataset(path)
    assert dataset.has_stable_row_ids == stable_row_ids
    return dataset


def open_dataset(path: Path) -> lance.LanceDataset:
    """Open the newest version.

    Raises:
        RunError: there is no dataset.
    """
    if not path.is_dir():
        raise RunError(f"expected a Lance dataset at {path}, found none")
    session = lance.Session(
        index_cache_size_bytes=CACHE_BYTES, metadata_cache_size_bytes=CACHE_BYTES
    )
    return lance.dataset(str(path), session=session)


def trajectories_that_count(writers: Path) -> str | None:
    """Return the condition on trajectories, or None where all count."""
    return _that_count(writers, f"{COMMIT_ORDER} < {{fence.trajectory_watermark}}")


def evaluations_that_count(writers: Path) -> str | None:
    """Return the condition on held-out answers, or None where all count."""
    return _that_count(writers, f"{COMMIT_ORDER} < {{fence.evaluation_watermark}}")


def steps_that_count(writers: Path) -> str | None:
    """Return the condition on ledger rows, or None where all count."""
    return _that_count(writers, "step <= {fence.step}")


def both(first: str | None, second: str | None) -> str | None:
    """Return a condition that holds where both do; None holds everywhere."""
    return _all_of(f"({condition})" for condition in (first, second) if condition)


def _that_count(writers: Path, older: str) -> str | None:
    """Return the condition that a row is of a fence's epoch or a later one, or `older`."""
    rule = f"(writer_epoch >= {{fence.writer_epoch}} OR {older})"
    return _all_of(rule.format(fence=fence) for fence in read_fences(writers))


def _all_of(conditions: Iterable[str]) -> str | None:
    return " AND ".join(conditions) or None


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into one error that says what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno == errno.ENOSPC or "No space left" in str(error)
        advice = "free some space" if full else "check the disk and its permissions"
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


def compact(dataset: lance.LanceDataset, committing: Lock) -> None:
    """Merge small fragments and drop old versions; safe beside commits and readers.

    The rows are rewritten beside the commits; only to name the result it holds `committing`, the
    writer's lock. Against a writer that commits all the time Lance's own retries do not win.

    Manifests may take a quarter of the data's bytes, so that a reader finds the version that it
    opened for as long as the space allows: with the defaults of Lance they would take everything.
    A cleanup reads every manifest that stays, so it waits until a quarter more are there.
    """
    plan = Compaction.plan(dataset, {"target_rows_per_fragment": ROWS_PER_FRAGMENT})
    rewritten = [task.execute(dataset) for task in plan.tasks]
    if rewritten:
        with committing:
            Compaction.commit(dataset, rewritten)
    root = Path(dataset.uri)
    manifests = list(_file_sizes(root / "_versions"))
    affordable = sum(_file_sizes(root / "data")) // (4 * max(manifests, default=1))
    retained = max(LEAST_VERSIONS, affordable)
    if len(manifests) > retained * 5 // 4:
        dataset.cleanup_old_versions(retain_versions=retained, error_if_tagged_old_versions=False)


def _file_sizes(folder: Path) -> Iterator[int]:
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # writers rename and clean up meanwhile
            yield entry.stat().st_size


class DurableDirectory:
    """Forces a directory's files to disk; Lance itself does not. Each file once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._synced: set[Path] = set()

    def sync(self) -> None:
        """Return when every file that exists now survives a power failure."""
        present = set()
        for folder, _, names in os.walk(self._path):
            for file in (Path(folder) / name for name in names):
                present.add(file)
                if file not in self._synced:
                    self._force(file)
            self._force(Path(folder))
        self._synced = present

    @staticmethod
    def _force(path: Path) -> None:
        with suppress(FileNotFoundError):  # compaction and cleanup go on meanwhile
            force_to_disk(path)
