"""A short form of `benchmarks/soak.py`: the drivers of one run are killed, and leave nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import TINY, run_soak

pytestmark = pytest.mark.slow
NUM_WORKERS = 3
"""A generator, a trainer and a reward worker."""


@pytest.mark.timeout(600)
def test_killed_run_ends_with_a_clean_log_and_leaves_no_files_behind(tmp_path: Path) -> None:
    tables = run_soak(tmp_path, **TINY)
    (verdict,) = tables["Verdict"]
    assert (verdict["steps"], verdict["kills"]) == (60, 2)
    assert "clean" in verdict["check"]
    files = {row["folder"]: row["files"] for row in tables["Files"]}
    assert files["writers"] == 3
    empty = ("weights", "processes", "rendezvous", "shared memory")
    assert {folder: files.get(folder, 0) for folder in empty} == dict.fromkeys(empty, 0)
    left = [path for path in (tmp_path / "temporary").rglob("*") if path.is_file()]
    assert {"global.lock", "purge.lock"} <= {path.name for path in left}
    # On a busy machine a worker is killed before it has ended. Dask's next start removes its lock.
    late_workers = [path for path in left if path.suffix == ".dirlock"]
    assert len(left) == 2 + len(late_workers)
    assert len(late_workers) <= NUM_WORKERS
    assert [row["process"] for row in tables["Processes"] if row["memory_mb"] > 0] == [
        *("driver", "reward", "generator", "trainer", "other")
    ]
