"""Data files that no version of a dataset names: written by somebody who died before the commit."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from areal_flow.store.dataset import open_dataset, read_errors

_DATA_FILE = "data file"


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
