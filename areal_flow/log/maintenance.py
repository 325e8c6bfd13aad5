"""Keeps a dataset small, fast and durable: compaction, cleanup of old versions, syncing to disk.

A commit writes a manifest with all fragments, so their number must not grow with the log: their
size does. No other commit runs while a compaction commits its result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby, islice
from math import log
from pathlib import Path
from threading import Lock
from typing import Any

from lance import LanceDataset
from lance.fragment import FragmentMetadata, LanceFragment
from lance.optimize import Compaction, CompactionTask, RewriteResult

from areal_flow.core.durable import force_to_disk
from areal_flow.log.dataset import BYTES_AT_ONCE, IO_BUFFER_BYTES, open_dataset, storage_errors

COMMITS_BETWEEN_MAINTENANCE = 50
MIN_ROWS_PER_FRAGMENT, MAX_BYTES_PER_FRAGMENT = 1024, 256 << 20
"""Where a fragment is full in the smallest log, and in any."""
FULL_FRAGMENTS = 512
"""How many full fragments hold the largest log whose fragments have a certain size."""
MIN_MERGED = 8
"""How many fragments of similar size are merged if together they do not fill a fragment."""
FULL = -1
"""In place of a tier: two such fragments do not fit into one."""
MAX_REWRITES, MAX_REWRITTEN_BYTES = 64, 4 << 30
"""Of one compaction, so that it stays short: the rest waits for the next one. More merges than
commits since the last, even if each is of two fragments: else their number would grow."""
MIN_VERSIONS, MAX_VERSIONS = 64, 512
"""How many versions a cleanup keeps: for readers pinned to them, and while a resumed driver, which
reads all manifests, does so in a few seconds."""


class Maintenance:
    """`run` and `sync` may run in other threads during commits.

    `run` opens the dataset itself, since a Lance handle refuses other threads while one of them
    changes it.
    """

    def __init__(self, path: Path, *, num_fragments: int) -> None:
        self._path = path
        self._num_commits = num_fragments
        self._commit_lock = Lock()
        self._synced: set[Path] = set()
        self._first_rows: dict[int, int] = {}
        """Of each fragment, by its number."""

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
        """
        self._num_commits = 0
        dataset = open_dataset(self._path)
        if rewrites := self._rewrite_fragments(dataset):
            with self._commit_lock:
                Compaction.commit(dataset, rewrites)
        self._clean_up(dataset)

    def _rewrite_fragments(self, dataset: LanceDataset) -> list[RewriteResult]:
        """Write merged fragments; the smallest come last, since they hold the newest rows."""
        fragments = self._in_order(dataset)
        full_rows = rows_per_fragment(dataset.count_rows())
        fill_levels = [
            max(fragment.physical_rows / full_rows, _num_bytes(fragment) / MAX_BYTES_PER_FRAGMENT)
            for fragment in fragments
        ]
        chosen = bounded(merges(fill_levels), [*map(_num_bytes, fragments)])
        groups = [[fragments[position] for position in positions] for positions in chosen]
        return [_rewrite(dataset, group, full_rows) for group in reversed(groups)]

    def _in_order(self, dataset: LanceDataset) -> list[FragmentMetadata]:
        """Return fragments in the order of their rows; a compaction puts merged ones at the end."""
        fragments, before = dataset.get_fragments(), self._first_rows
        self._first_rows = {
            number: before[number] if number in before else _first_row(fragment)
            for number, fragment in ((each.fragment_id, each) for each in fragments)
        }
        fragments.sort(key=lambda fragment: self._first_rows[fragment.fragment_id])
        return [fragment.metadata for fragment in fragments]

    def _clean_up(self, dataset: LanceDataset) -> None:
        """Delete old versions, once there are a quarter more than are kept.

        Between the limits those stay until their manifests take a quarter of the data's bytes;
        Lance's defaults would set no limit. A cleanup reads every manifest that it keeps, hence the
        quarter more.
        """
        if self._path.is_file():  # listing files in an object store is too slow
            dataset.cleanup_old_versions(retain_versions=MIN_VERSIONS)
            return
        manifest_sizes = list(_file_sizes(self._path / "_versions"))
        max_bytes = sum(_file_sizes(self._path / "data")) // 4
        num_small = max_bytes // max(manifest_sizes, default=1)
        num_retained = min(max(MIN_VERSIONS, num_small), MAX_VERSIONS)
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


def rows_per_fragment(num_rows: int) -> int:
    """Return the rows of a full fragment in a log of this size.

    Powers of two: when the log has doubled, its full fragments are merged in pairs.
    """
    size = MIN_ROWS_PER_FRAGMENT
    while size * FULL_FRAGMENTS < num_rows:
        size *= 2
    return size


def merges(fill_levels: Sequence[float]) -> Iterator[list[int]]:
    """Yield the positions of fragments to merge, smallest fragments first.

    Only fragments of similar size are merged, as in a log-structured merge tree: if the newest rows
    were always merged into the fragment before them, each would be rewritten many times. A row is
    rewritten O(log n) times in a log of n rows. What is merged stands in a row, with smaller ones
    between: else the manifest would have a list of a fragment's rows in place of their range.

    Args:
        fill_levels: of each fragment, in the order of their rows: its size over that of a full one.
    """
    tiers = [int(-log(level, MIN_MERGED)) if level <= 1 / 2 else FULL for level in fill_levels]
    is_free = [tier != FULL for tier in tiers]
    for tier in sorted(set(tiers) - {FULL}, reverse=True):
        allowed = [free and own >= tier for free, own in zip(is_free, tiers, strict=True)]
        for is_allowed, places in groupby(range(len(tiers)), key=allowed.__getitem__):
            if not is_allowed:
                continue
            for group, is_full in _filled(places, fill_levels):
                if is_full or sum(tiers[place] == tier for place in group) >= MIN_MERGED:
                    for place in group:
                        is_free[place] = False
                    yield group


def _filled(
    positions: Iterable[int], fill_levels: Sequence[float]
) -> Iterator[tuple[list[int], bool]]:
    """Yield groups of positions, and whether the next one would have been too much."""
    group, filled = list[int](), 0.0
    for position in positions:
        if filled + fill_levels[position] > 1:
            yield group, True
            group, filled = [], 0.0
        group.append(position)
        filled += fill_levels[position]
    yield group, False


def bounded(groups: Iterator[list[int]], num_bytes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the first groups of positions, as many as one compaction rewrites."""
    num_rewritten = 0
    for group in islice(groups, MAX_REWRITES):
        yield group
        num_rewritten += sum(num_bytes[position] for position in group)
        if num_rewritten > MAX_REWRITTEN_BYTES:
            return


def _rewrite(
    dataset: LanceDataset, group: Sequence[FragmentMetadata], full_rows: int
) -> RewriteResult:
    num_rows, num_bytes = sum(f.physical_rows for f in group), sum(map(_num_bytes, group))
    options = {
        "target_rows_per_fragment": full_rows,
        "batch_size": max(1, BYTES_AT_ONCE * num_rows // max(1, num_bytes)),
        "io_buffer_size": IO_BUFFER_BYTES,
    }
    # Lance would merge all adjacent fragments; its plan serves for the other fields of a task.
    plan: dict[str, Any] = json.loads(Compaction.plan(dataset, options).json())
    del plan["tasks"]
    task = {**plan, "task": {"fragments": [fragment.to_json() for fragment in group]}}
    result = json.loads(CompactionTask.from_json(json.dumps(task)).execute(dataset).json())
    # For each commit whose rows it has, a fragment would keep 20 bytes in all later manifests.
    for fragment in result["new_fragments"]:
        fragment |= {"created_at_version_meta": None, "last_updated_at_version_meta": None}
    return RewriteResult.from_json(json.dumps(result))


def _first_row(fragment: LanceFragment) -> int:
    (row,) = fragment.to_table(columns=[], with_row_id=True, limit=1)["_rowid"].to_pylist()
    return int(row)


def _num_bytes(fragment: FragmentMetadata) -> int:
    return sum(file.file_size_bytes or 0 for file in fragment.files)


def _file_sizes(folder: Path) -> Iterator[int]:
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # a writer renamed or deleted it meanwhile
            yield entry.stat().st_size


def _force_to_disk(path: Path) -> None:
    with suppress(FileNotFoundError):  # a compaction or cleanup deleted it meanwhile
        force_to_disk(path)
