"""What a growing dataset needs of its one writer, beside the commits themselves.

Commits are counted; every so many, compaction is due. Nobody else commits while the result of one
is named. Whatever is committed can be forced to disk, and versions can be kept by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from areal_flow.store.dataset import DurableDirectory, compact, open_dataset, storage_errors

COMMITS_BETWEEN_ROUNDS = 50


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
