"""What a growing dataset needs of its one writer, beside the commits themselves.

Commits are counted; every so many, compaction is due. Nobody else commits while the result of one
is named. Whatever is committed can be forced to disk, and versions can be kept by name. A writer
that died before its commit leaves data files that no version names: the next writer removes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from areal_flow.store.dataset import (
    DurableDirectory,
    compact,
    open_dataset,
    read_errors,
    storage_errors,
)

COMMITS_BETWEEN_ROUNDS = 50
_DATA_FILE = "data file"


class Maintenance:
    """Keeps one dataset small, quick and durable.

    Everything but `commit` may run in other threads, beside commits: each opens the dataset for
    itself, since a Lance handle refuses whoever comes while another thread changes it.
    """

    def __init__(self, path: Path, *, num_fragments: int) -> None:
        """Begin with the fragments that are there: earlier lives may have been too short."""
        self._path = path
        self._num_commits = num_fragments
        self._committing = Lock()
        self._durable = DurableDirectory(path)

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Hold the writer's lock around one commit, and count it.

        Raises:
            StorageError: the disk refused; nothing was written.
        """
        with self._committing, storage_errors(self._path):
            yield
        self._num_commits += 1

    @property
    def is_due(self) -> bool:
        return self._num_commits >= COMMITS_BETWEEN_ROUNDS

    def run(self) -> None:
        """Compact and clean up; safe beside commits and readers."""
        self._num_commits = 0
        compact(open_dataset(self._path), self._committing)

    def sync(self) -> None:
        """Force everything committed to disk."""
        self._durable.sync()

    def tag(self, name: str, version: int) -> None:
        """Keep a version for as long as its tag; without it the version goes with time."""
        with suppress(OSError, ValueError):  # cleanup was faster: the watermark still names it
            open_dataset(self._path).tags.create(name, version)

    def untag(self, name: str) -> None:
        """Let a version go; one that has no tag is gone already."""
        with suppress(OSError, ValueError):
            open_dataset(self._path).tags.delete(name)


def unreferenced_files(path: Path) -> list[str]:
    """Return the data files that no version of the dataset names, relative to it.

    Raises:
        StorageError: a manifest cannot be read.
    """
    stored = {file.relative_to(path).as_posix() for file in (path / "data").glob("*.lance")}
    with read_errors(path):
        for batch in open_dataset(path).tracked_files():
            rows = zip(batch["path"].to_pylist(), batch["type"].to_pylist(), strict=True)
            stored -= {file for file, kind in rows if kind == _DATA_FILE}
    return sorted(stored)


def remove_orphans(path: Path, *, written_before: float) -> int:
    """Remove unreferenced files that are older than a moment; return how many.

    Args:
        written_before: seconds since the epoch. Nobody who wrote before it may be alive: a younger
            file may be somebody's next commit, and a manifest that names a missing file is broken.
    """
    num_removed = 0
    for name in unreferenced_files(path):
        with suppress(FileNotFoundError):
            if (path / name).stat().st_mtime < written_before:
                (path / name).unlink()
                num_removed += 1
    return num_removed
