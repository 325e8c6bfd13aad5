"""Which checkpoints a run has, which are kept, and how damaged ones are handled."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from areal_flow.policy.checkpoints import (
    CheckpointState,
    checkpoint_hashes,
    checkpoint_path,
    list_checkpoints,
    prune_checkpoints,
    read_checkpoint_state,
    set_aside,
)


def state_of(step: int) -> CheckpointState:
    return CheckpointState(step, f"w{step}", f"o{step}", 7 * step, "config")


def write(root: Path, *steps: int) -> None:
    for step in steps:
        checkpoint_path(root, step).mkdir(parents=True)
        (checkpoint_path(root, step) / "state.json").write_text(json.dumps(asdict(state_of(step))))


def test_only_complete_checkpoints_are_listed_in_order(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "absent") == []
    write(tmp_path, 20, 0, 100, 3)
    (tmp_path / "00000007").mkdir()
    (tmp_path / ".partial-00000008-1").mkdir()
    (tmp_path / ".partial-00000008-1" / "state.json").write_text("{}")
    assert list_checkpoints(tmp_path) == [0, 3, 20, 100]


@pytest.mark.parametrize("damage", ["not JSON", '{"step": 5}', "[]"])
def test_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    write(tmp_path, 0, 5, 10)
    (tmp_path / "00000005" / "state.json").write_text(damage)
    assert checkpoint_hashes(tmp_path) == {0: "w0", 10: "w10"}


def test_damaged_checkpoint_is_set_aside_whole_and_again(tmp_path: Path) -> None:
    for _ in range(2):
        write(tmp_path, 5)
        aside = set_aside(tmp_path / "00000005")
        assert aside == tmp_path / ".damaged-00000005"
        assert read_checkpoint_state(aside) == state_of(5)
        assert list_checkpoints(tmp_path) == []


@pytest.mark.parametrize(
    ("keep", "pruned"), [(1, [5, 10, 15]), (2, [5, 10]), (4, []), (9, [])], ids=str
)
def test_the_first_and_the_newest_are_kept(tmp_path: Path, keep: int, pruned: list[int]) -> None:
    write(tmp_path, 0, 5, 10, 15, 20)
    (tmp_path / ".pruned-00000003").mkdir()
    removed = prune_checkpoints(tmp_path, keep=keep)
    assert removed == [checkpoint_path(tmp_path, step) for step in pruned]
    assert list_checkpoints(tmp_path) == [s for s in (0, 5, 10, 15, 20) if s not in pruned]
    assert list(tmp_path.glob(".pruned-*")) == [], "what an earlier driver left goes, too"
