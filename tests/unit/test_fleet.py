"""The benchmark of a fleet runs at a small size: many generators, one process, a real driver."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import fleet


@pytest.mark.slow
def test_twenty_generators_of_one_process_train_with_a_driver_of_their_own(tmp_path: Path) -> None:
    sizes = ["--batch-size", "64", "--group-size", "8", "--long-batch-size", "32"]
    numbers = ["--generators", "20", "--steps", "4", "--skip", "2", "--long-steps", "6"]
    fleet.main([*numbers, *sizes, "--json", str(tmp_path / "figures.json")])
    tables = json.loads((tmp_path / "figures.json").read_text())["tables"]
    (steps,), memory = tables.values()
    assert steps["generators"] == 20
    assert [row["steps"] for row in memory] == [1, 2, 2, 3, 3, 4, 5, 5, 6, 6]
    assert steps["driver_s"] > 0
    assert steps["files"] < 256 + 8 * (20 + 1 + fleet.NUM_REWARD_WORKERS)
