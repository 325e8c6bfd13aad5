"""The barrier schedule and the asynchronous one without staleness: the same losses, bit for bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import areal_flow
from tests.integration.runs import check_accounting, done, run_small, small_recipe

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


def test_resumed_epochs_are_those_of_one_run_to_the_bit(tmp_path: Path) -> None:
    """32 prompts, 8 a step: the run ends, and is resumed, after each prompt was trained once."""

    def trained(name: str, num_steps: int) -> Path:
        recipe = small_recipe(
            num_steps=num_steps,
            schedule="sync",
            sft={"num_steps": 2},
            prompts={"num_prompts": 32, "num_held_out": 0},
            controller={"batch_size": 64, "group_size": 8},
            generation={"batch_invariant": True},
            trainer={"checkpoint_every_steps": 4, "learning_rate": 1e-3},
        )
        return run_small(tmp_path / "runs" / name, recipe).root

    uninterrupted, resumed = trained("whole", 8), trained("resumed", 4)
    done(tmp_path, "train", "--resume", "resumed", "--num-steps", "8")
    of_whole, of_resumed = (areal_flow.open_run(root) for root in (uninterrupted, resumed))
    columns = ["step", "weights_hash", "trajectory_ids"]
    steps = [sorted_rows(run, columns) for run in (of_whole, of_resumed)]
    assert steps[0] == steps[1]
    assert [row["step"] for row in steps[0]] == [*range(9)]
    assert len({row["weights_hash"] for row in steps[0]}) == 9
    columns = ["trajectory_id", "prompt_id"]
    rows = of_resumed.trajectories("arrow", columns=columns).to_pylist()
    prompts = {row["trajectory_id"]: row["prompt_id"] for row in rows}
    for epoch in (steps[1][1:5], steps[1][5:]):
        counts = Counter(prompts[each] for row in epoch for each in row["trajectory_ids"])
        assert len(counts) == 32
        assert {*counts.values()} == {8}


def sorted_rows(run: Any, columns: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = run.steps("arrow", columns=columns).to_pylist()
    return sorted(rows, key=lambda row: row["step"])


def test_exact_staleness_holds_in_a_run_and_over_its_resume(tmp_path: Path) -> None:
    recipe = small_recipe(
        num_steps=4, prompts={"num_held_out": 0}, controller={"exact_staleness": 2}
    )
    layout = run_small(tmp_path / "runs" / "exact", recipe)
    done(tmp_path, "train", "--resume", "exact", "--num-steps", "6")
    check_accounting(layout)
    steps = areal_flow.open_run(layout.root).steps(where="step > 0")
    assert steps.staleness_mean.tolist() == [0, 1, 2, 2, 2, 2]
    assert steps.staleness_max.tolist() == [0, 1, 2, 2, 2, 2]
