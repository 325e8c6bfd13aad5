"""The barrier schedule and the asynchronous one without staleness: the same losses, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import areal_flow
from tests.integration.runs import check_accounting, run_small, small_recipe

pytestmark = pytest.mark.slow


def rows(root: Path, **changes: Any) -> list[dict[str, Any]]:
    layout = run_small(
        root,
        small_recipe(
            num_steps=5,
            prompts={"num_held_out": 0},
            controller={"max_staleness": 0},
            generation={"batch_invariant": True},
            trainer={"learning_rate": 1e-3},
            rewards=[{"verifier": "tests.integration.verifiers:reward_length"}],
            **changes,
        ),
    )
    check_accounting(layout)
    steps: list[dict[str, Any]] = areal_flow.open_run(layout.root).steps("arrow").to_pylist()
    return sorted(steps, key=lambda row: row["step"])


def test_sync_and_async_without_staleness_are_equal_to_the_bit(tmp_path: Path) -> None:
    overlapped = rows(tmp_path / "async", schedule="async")
    barrier = rows(tmp_path / "sync", schedule="sync", cluster={"num_generators": 2})
    assert len(overlapped) == len(barrier) == 6
    for a, b in zip(overlapped, barrier, strict=True):
        assert a["trajectory_ids"] == b["trajectory_ids"]
        assert a["loss"] == b["loss"]
        assert a["weights_hash"] == b["weights_hash"]
        assert a["staleness_max"] == b["staleness_max"] == (0 if a["step"] else None)
    assert len({row["loss"] for row in overlapped[1:]}) == 5
