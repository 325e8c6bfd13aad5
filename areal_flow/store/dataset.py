"""What all Lance datasets share: creation, opening, which rows count, clear disk errors.

All rows count but those that a driver wrote after its run was taken over. A run that was never
taken over from a driver that was alive has no fences and needs no condition.
"""

from __future__ import annotations

import builtins
import errno
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lance
import pyarrow as pa

from areal_flow.errors import ArealFlowError, RunError, StorageError
from areal_flow.run.lease import read_fences

if hasattr(builtins, "__IPYTHON__"):  # `!command` forks, but only to start another program
    warnings.filterwarnings("ignore", "lance is not fork-safe", UserWarning)
    warnings.filterwarnings("ignore", "IProgress not found")  # tqdm, of bars that nobody needs

FORMAT_VERSION = "2.2"
COMMIT_ORDER = "_rowid"
"""Lance's stable row id: 0, 1, 2, ... as rows were committed. A scan's order is not that: a
compaction beside an append puts its older rows behind the newer ones."""
CACHE_BYTES = 16 << 20
"""What an open dataset may remember. Lance's default is a GiB and more, and appends fill it up."""
_BEFORE_FENCE = {
    "trajectories.lance": f"{COMMIT_ORDER} < {{fence.trajectory_watermark}}",
    "steps.lance": "step <= {fence.step}",
    "evaluations.lance": f"{COMMIT_ORDER} < {{fence.evaluation_watermark}}",
}


def create_dataset(
    path: Path, schema: pa.Schema, *, stable_row_ids: bool = False
) -> lance.LanceDataset:
    """Create an empty dataset: whoever looks finds none, or a whole one.

    Args:
        stable_row_ids: number rows in the order of their commits (`COMMIT_ORDER`). Each commit then
            costs every later manifest some 25 bytes.
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


def write_dataset(path: Path, tables: Iterable[pa.Table], schema: pa.Schema) -> int:
    """Write tables as a new dataset: whoever looks finds none, or a whole one.

    Returns:
        The number of rows.
    """
    if path.exists():
        raise RunError(f"{path} exists already")
    aside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    batches = (batch for table in tables for batch in table.cast(schema).to_batches())
    with storage_errors(path):
        reader = pa.RecordBatchReader.from_batches(schema, batches)
        written = lance.write_dataset(reader, str(aside), data_storage_version=FORMAT_VERSION)
        num_rows = int(written.count_rows())
        aside.rename(path)
    return num_rows


def open_dataset(path: Path) -> lance.LanceDataset:
    if not path.is_dir():
        raise RunError(f"expected a Lance dataset at {path}, found none")
    session = lance.Session(
        index_cache_size_bytes=CACHE_BYTES, metadata_cache_size_bytes=CACHE_BYTES
    )
    return lance.dataset(str(path), session=session)


def has_version(path: Path, version: int) -> bool:
    """Return whether a version is still there; old ones are cleaned up while a run goes on."""
    try:
        lance.dataset(str(path), version=version)
    except (OSError, ValueError):
        return False
    return True


def read_rows(
    path: Path, writers: Path, columns: Sequence[str] | None = None, where: str | None = None
) -> pa.Table:
    """Return the rows of a run's dataset that count.

    Args:
        columns: read only these.
        where: an SQL condition, evaluated by Lance.
    """
    names = None if columns is None else list(columns)
    condition = all_of(where, that_count(path, writers))
    return open_dataset(path).to_table(columns=names, filter=condition)


def that_count(path: Path, writers: Path) -> str | None:
    """Return the condition on the rows of a run's dataset, by its name; None where all count.

    A row counts if it is of a fence's epoch or a later one, or was there before the fence.
    """
    before = _BEFORE_FENCE[path.name]
    return all_of(
        *(
            f"writer_epoch >= {fence.writer_epoch} OR {before.format(fence=fence)}"
            for fence in read_fences(writers)
        )
    )


def all_of(*conditions: str | None) -> str | None:
    """Return a condition that holds where all do; None holds everywhere."""
    return " AND ".join(f"({condition})" for condition in conditions if condition) or None


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
