"""What a replay prints about trajectories; completions are shown unchanged."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from areal_flow.core.layout import RunLayout
from areal_flow.core.types import StepResult
from areal_flow.flow.recovery.replay import Replayed
from areal_flow.flow.recovery.restore import ComparedStep
from areal_flow.training.inspection import InspectedTrajectory, TrajectoryOutcome
from pipelines.cli.trajectory_report import most_different, report_replay
from pipelines.console.tables import show
from pipelines.tiny_jobs.tiny_policy import build_tokenizer, write_tiny_model
from tests.unit.test_comparison import result


def replayed_with(text: str) -> Replayed:
    tokens = tuple(build_tokenizer().encode(text).ids)
    zeros, nothing = (0.0,) * len(tokens), (False,) * len(tokens)
    trajectories = tuple(
        InspectedTrajectory(
            trajectory_id=f"t-{index}",
            reward=0.0,
            tokens=tokens,
            versions=(0,) * len(tokens),
            too_old=(True,) + (False,) * (len(tokens) - 1),
            staleness_max=0,
            behavior_logprobs=zeros,
            proximal_logprobs=zeros,
            replayed=TrajectoryOutcome(0.0, nothing, nothing, (float(index),) * len(tokens)),
        )
        for index in range(3)
    )
    return Replayed(0, (), ComparedStep(result(), result()), None, {}, trajectories)


def test_tokens_are_neither_markup_nor_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = RunLayout(tmp_path)
    write_tiny_model(layout.model, max_model_len=32)
    replayed = replayed_with("[bold][/b]\x1b[2J")
    report = report_replay(layout, replayed, num_trajectories=1, tokens_of="t-1")
    assert show(report, as_json=False) == 0
    output = capsys.readouterr().out
    tokens = [line.split("'")[1] for line in output.splitlines() if line.count("'") == 2]
    assert "".join(tokens) == "[bold][/b]\\x1b[2J"
    assert "\x1b" not in output


def test_tokens_without_gradient_are_shown_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_model(RunLayout(tmp_path).model, max_model_len=32)
    replayed = replayed_with("12")
    report = report_replay(RunLayout(tmp_path), replayed, num_trajectories=1, tokens_of="t-1")
    show(report, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    heading, row = (re.split(" {2,}", line) for line in lines if re.match("trajectory |t-2 ", line))
    counts = dict(zip(heading, row, strict=True))
    assert [counts[name] for name in ("trained", "environment", "too old")] == ["0", "1", "1"]
    reasons = [line.rpartition("  ")[2] for line in lines if line.count("'") == 2]
    assert reasons == ["masked: too old", "masked: environment"]


def test_most_different_come_first() -> None:
    shown = most_different(replayed_with("12"), 2)
    assert [trajectory.trajectory_id for trajectory in shown] == ["t-2", "t-1"]


def test_step_of_another_algorithm_is_shown_with_the_metrics_that_each_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(**metrics: float) -> StepResult:
        return replace(result(), metrics=replace(result().metrics, metrics=metrics))

    compared = ComparedStep(step(clip_fraction=0.25), step(clip_fraction=0.25))
    changed = replace(replayed_with("12"), compared=compared, changed=step(sequence_ratio_mean=1.5))
    report = report_replay(RunLayout(tmp_path), changed, num_trajectories=0, tokens_of=None)
    show(report, as_json=False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["clip", "fraction", "0.25", "0.25", "yes", "-"] in rows
    assert ["sequence", "ratio", "mean", "-", "-", "-", "1.5"] in rows
