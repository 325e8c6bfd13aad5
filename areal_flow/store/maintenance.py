"""What a growing dataset needs of its one writer, beside the commits themselves.

Commits are counted; every so many, compaction is due. Nobody else commits while the result of one
is named. Whatever is committed can be forced to disk. A writer
that died before its commit leaves data files that no version names: the next writer removes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from lance.optimize import Compaction

from areal_flow.run.durable import force_to_disk
from areal_flow.store.dataset import open_dataset, read_errors, storage_errors

COMMITS_BETWEEN_ROUNDS = 50
ROWS_PER_FRAGMENT = 1024
LEAST_VERSIONS = 64
"""Versions that stay at least, for readers that are pinned to them."""
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
        self._synced: set[Path] = set()

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Hold the writer's lock around one commit, and count it."""
        with self._committing, storage_errors(self._path):
            yield
        self._num_commits += 1

    @property
    def is_due(self) -> bool:
        return self._num_commits >= COMMITS_BETWEEN_ROUNDS

    def run(self) -> None:
        """Merge small fragments and drop old versions; safe beside commits and readers.

        The rows are rewritten beside the commits; only to name the result it holds the writer's
        lock. Against a writer that commits all the time Lance's own retries do not win.

        Manifests may take a quarter of the data's bytes, so that a reader finds the version that it
        opened for as long as the space allows: with the defaults of Lance they would take
        everything. A cleanup reads every manifest that stays, so it waits until a quarter more are
        there.
        """
        self._num_commits = 0
        dataset = open_dataset(self._path)
        plan = Compaction.plan(dataset, {"target_rows_per_fragment": ROWS_PER_FRAGMENT})
        if rewritten := [task.execute(dataset) for task in plan.tasks]:
            with self._committing:
                Compaction.commit(dataset, rewritten)
        manifests = list(_file_sizes(self._path / "_versions"))
        affordable = sum(_file_sizes(self._path / "data")) // (4 * max(manifests, default=1))
        retained = max(LEAST_VERSIONS, affordable)
        if len(manifests) > retained * 5 // 4:
            dataset.cleanup_old_versions(retain_versions=retained)

    def sync(self) -> None:
        """Force every file that exists now to disk, each once; Lance itself does not."""
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
    """Return the data files that no version of the dataset names, relative to it."""
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
