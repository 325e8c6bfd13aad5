"""Fragments grow with the log, so that a commit's manifest stays small; readers notice nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, pairwise
from math import ceil
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

from areal_flow.log import maintenance
from areal_flow.log.dataset import COMMIT_ORDER, create_dataset, open_dataset
from areal_flow.log.maintenance import (
    FULL_FRAGMENTS,
    MAX_BYTES_PER_FRAGMENT,
    MAX_REWRITTEN_BYTES,
    Maintenance,
    bounded,
    merges,
    rows_per_fragment,
)

COMMITS_BETWEEN_RUNS = 50


def grown_log(
    num_rows: int, rows_of_commits: Sequence[int], row_bytes: int
) -> Iterator[tuple[int, int]]:
    """Yield, for each run of maintenance, the fragments before it and the rewritten rows."""
    sizes: list[int] = []
    commits = [rows for rows, _ in zip(cycle(rows_of_commits), range(COMMITS_BETWEEN_RUNS))]
    for _ in range(ceil(num_rows / sum(commits))):
        sizes += commits
        full = rows_per_fragment(sum(sizes))
        levels = [max(n / full, n * row_bytes / MAX_BYTES_PER_FRAGMENT) for n in sizes]
        groups = list(bounded(merges(levels), [n * row_bytes for n in sizes]))
        assert all(sum(levels[place] for place in group) <= 1 for group in groups)
        merged = {place for group in groups for place in group}
        yield len(sizes), sum(sizes[place] for place in merged)
        assert all(group == [*range(group[0], group[-1] + 1)] for group in groups), "in a row"
        grown = {group[0]: sum(sizes[place] for place in group) for group in groups}
        sizes = [
            grown.get(place, size)
            for place, size in enumerate(sizes)
            if place in grown or place not in merged
        ]


@pytest.mark.parametrize(
    ("num_rows", "rows_of_commits", "row_bytes"),
    [
        (30_000, [8], 1000),
        (1_000_000, [16], 1000),
        (1_000_000, [512, 288], 1000),
        (10_000_000, [512], 1000),
        (10_000_000, [8192], 20_000),
    ],
)
def test_number_of_fragments_is_bounded_and_each_row_is_rewritten_a_few_times(
    num_rows: int, rows_of_commits: list[int], row_bytes: int
) -> None:
    runs = list(grown_log(num_rows, rows_of_commits, row_bytes))
    full_fragments = max(FULL_FRAGMENTS, num_rows * row_bytes // MAX_BYTES_PER_FRAGMENT)
    assert max(num_fragments for num_fragments, _ in runs) < 2.5 * full_fragments
    assert sum(num_rewritten for _, num_rewritten in runs) <= 3 * num_rows
    longest = max(num_rewritten for _, num_rewritten in runs)
    assert longest * row_bytes <= MAX_REWRITTEN_BYTES + MAX_BYTES_PER_FRAGMENT


def test_fragments_that_do_not_fill_one_wait_for_others_of_their_size() -> None:
    assert list(merges([1 / 16] * 7)) == []
    assert list(merges([1 / 16] * 8)) == [[*range(8)]]
    assert list(merges([1 / 4, *[1 / 64] * 8])) == [[*range(1, 9)]]
    assert list(merges([1 / 2, 1 / 2, 1 / 2])) == [[0, 1]]


def test_only_fragments_in_a_row_are_merged_with_smaller_ones_between() -> None:
    assert list(merges([1 / 2, 1, 1 / 2, 1, 1 / 2])) == []
    assert list(merges([1 / 2, 1 / 64, 1 / 4, 1 / 64, 1 / 2])) == [[0, 1, 2, 3]]
    eight = [1 / 16, 1 / 512] * 8
    assert list(merges([1 / 2, *eight, 1])) == [[*range(1, 17)]]
    assert list(merges([*eight[:14], 1, *eight[:2]])) == []


def test_full_fragments_double_with_the_log() -> None:
    sizes = [rows_per_fragment(num_rows) for num_rows in (0, 2**19, 2**19 + 1, 10_000_000)]
    assert sizes == [1024, 1024, 2048, 32_768]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a dataset whose fragments are full at 8 rows while it has at most 32."""
    monkeypatch.setattr(maintenance, "MIN_ROWS_PER_FRAGMENT", 8)
    monkeypatch.setattr(maintenance, "FULL_FRAGMENTS", 4)
    monkeypatch.setattr(maintenance, "MIN_VERSIONS", 4)
    path = tmp_path / "numbers.lance"
    schema = pa.schema([pa.field("number", pa.int64(), nullable=False)])
    create_dataset(path, schema, stable_row_ids=True)
    return path


def append(path: Path, *numbers: int) -> None:
    lance.write_dataset(pa.table({"number": numbers}), open_dataset(path), mode="append")


def rows(path: Path) -> dict[int, int]:
    """Return the numbers by their place in the order of commits."""
    table = open_dataset(path).to_table(with_row_id=True)
    return dict(zip(table[COMMIT_ORDER].to_pylist(), table["number"].to_pylist(), strict=True))


def manifest_bytes(path: Path) -> int:
    manifests = (path / "_versions").glob("*.manifest")
    return max(manifests, key=lambda file: file.stat().st_mtime_ns).stat().st_size


def test_rows_keep_their_place_in_the_order_of_commits_as_fragments_grow(path: Path) -> None:
    keeper = Maintenance(path, num_fragments=0)
    for number in range(200):
        append(path, 10 * number)
        if number % 10 == 9:
            keeper.run()
    assert rows(path) == {number: 10 * number for number in range(200)}
    fragments = open_dataset(path).get_fragments()
    sizes = [fragment.count_rows() for fragment in fragments]
    for fragment in fragments:
        ids = fragment.to_table(with_row_id=True)["_rowid"].to_pylist()
        assert ids == [*range(ids[0], ids[-1] + 1)], (
            "a range takes 20 bytes of a manifest, a list more"
        )
    assert rows_per_fragment(200) == 64
    assert max(sizes) > 32
    assert len(sizes) <= 20


def test_newest_rows_are_in_the_last_fragments_after_a_compaction(path: Path) -> None:
    keeper = Maintenance(path, num_fragments=0)
    for number in range(64):
        append(path, number)
        if number % 8 == 7:
            keeper.run()
    last = open_dataset(path).get_fragments()[-1].to_table()
    assert max(last["number"].to_pylist()) == 63


def test_rows_that_are_committed_while_others_are_rewritten_are_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append_later = [64, 65]
    for number in range(64):
        append(path, number)
    keeper = Maintenance(path, num_fragments=0)
    rewrite = keeper._rewrite_fragments

    def rewrite_beside_an_append(dataset: lance.LanceDataset) -> object:
        rewrites = rewrite(dataset)
        append(path, *append_later)
        return rewrites

    monkeypatch.setattr(keeper, "_rewrite_fragments", rewrite_beside_an_append)
    keeper.run()
    assert rows(path) == {number: number for number in range(66)}


def test_manifest_remembers_fragments_not_commits(path: Path) -> None:
    keeper = Maintenance(path, num_fragments=0)
    sizes = []
    for number in range(256):
        append(path, number)
        if number in (127, 255):
            for _ in range(8):
                keeper.run()
            append(path, -1)  # the manifest of a compaction names what it replaced, too
            sizes.append(manifest_bytes(path))
    assert sizes[1] < 1.5 * sizes[0]


def test_pinned_reader_reads_on_until_so_many_versions_have_followed(path: Path) -> None:
    keeper = Maintenance(path, num_fragments=0)
    for number in range(16):
        append(path, number)
    pinned = open_dataset(path)
    for number in range(16, 18):
        append(path, number)
    keeper.run()
    assert pinned.count_rows() == 16
    assert sorted(pinned.to_table()["number"].to_pylist()) == [*range(16)]
    versions = [entry["version"] for entry in open_dataset(path).versions()]
    assert len(versions) <= 8
    assert all(later == earlier + 1 for earlier, later in pairwise(versions))


@pytest.mark.parametrize(("num_rows", "num_retained"), [(1, 4), (100_000, 12)])
def test_cleanup_keeps_versions_by_the_size_of_the_data_within_limits(
    path: Path, num_rows: int, num_retained: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "MAX_VERSIONS", 12)
    append(path, *np.random.default_rng(0).integers(2**62, size=num_rows).tolist())
    for number in range(30):
        append(path, number)
    Maintenance(path, num_fragments=0).run()
    assert len(open_dataset(path).versions()) == num_retained
