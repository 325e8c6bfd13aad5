"""A replay that differs: refused where bits must repeat, recorded and reported elsewhere."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from areal_flow.core.errors import TrainingError
from areal_flow.core.layout import RunLayout
from areal_flow.core.types import NOTHING_TRAINED, PolicyHashes, StepResult
from areal_flow.flow.recovery.restore import ComparedStep, note_fork
from areal_flow.policy.checkpoints import is_recorded

CPU = {"device": "cpu", "torch": "2.13.0", "threads": 1}


def step(environment: dict[str, Any], **hashes: str) -> StepResult:
    made = {**{field.name: "h" for field in fields(PolicyHashes)}, "weights_hash": "w", **hashes}
    return StepResult(7, PolicyHashes(**made), NOTHING_TRAINED, json.dumps(environment), "p")


def test_equal_hashes_are_no_fork(tmp_path: Path) -> None:
    note_fork(RunLayout(tmp_path), ComparedStep(step(CPU), step({**CPU, "threads": 2})))
    other_loss = replace(step(CPU), metrics=replace(NOTHING_TRAINED, loss=1.0))
    note_fork(RunLayout(tmp_path), ComparedStep(step(CPU), other_loss))
    assert not RunLayout(tmp_path).forks.exists()


@pytest.mark.parametrize("name", [field.name for field in fields(PolicyHashes)])
def test_any_difference_in_the_same_environment_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TrainingError, match="same numeric environment"):
        note_fork(RunLayout(tmp_path), ComparedStep(step(CPU), step(CPU, **{name: "other"})))


def test_step_that_follows_a_fork_differs_in_the_same_environment(tmp_path: Path) -> None:
    replayed = step(CPU, weights_hash="other")
    note_fork(RunLayout(tmp_path), ComparedStep(step(CPU), replayed, after_fork=True))
    assert json.loads(RunLayout(tmp_path).forks.read_text())["step"] == 7


@pytest.mark.parametrize(
    ("there", "here"),
    [(CPU, {**CPU, "torch": "2.14.0"}), ({"device": "cuda"}, {"device": "cuda"})],
    ids=["another torch", "a GPU"],
)
def test_elsewhere_a_difference_is_recorded_and_reported(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    there: dict[str, Any],
    here: dict[str, Any],
) -> None:
    layout = RunLayout(tmp_path)
    note_fork(layout, ComparedStep(step(there), step(here, weights_hash="other")))
    assert "fork: step 7" in caplog.text
    recorded = json.loads(layout.forks.read_text())
    assert recorded["replayed"]["weights_hash"] == "other"
    assert recorded["recorded"]["weights_hash"] == "w"


def test_weights_are_recorded_in_the_row_of_their_step_or_in_a_replay_that_forked(
    tmp_path: Path,
) -> None:
    layout = RunLayout(tmp_path)
    there = step({"device": "cuda"})
    note_fork(layout, ComparedStep(there, step({"device": "cuda"}, weights_hash="other")))
    recorded = {
        (number, weights_hash)
        for number in (6, 7)
        for weights_hash in ("w", "other", "stranger")
        if is_recorded(number, weights_hash, {"weights_hash": "w"}, layout.forks)
    }
    assert recorded == {(6, "w"), (7, "w"), (7, "other")}
