"""On-policy distillation: a student comes closer to its teacher, and its steps replay."""

from __future__ import annotations

from pathlib import Path

import pytest

import areal_flow
from areal_flow.run.layout import RunLayout
from tests.integration.conftest import Typed
from tests.integration.runs import check_accounting, cli

pytestmark = pytest.mark.slow

SIZES = [
    *("--prompts.num-prompts", "600", "--prompts.num-held-out", "8", "--sft.batch-size", "16"),
    *("--tracking.enabled", "false"),
]
STUDENT = [
    *("--sft.num-steps", "20", "--controller.batch-size", "64", "--num-steps", "24"),
    *("--trainer.learning-rate", "1e-3", "--trainer.checkpoint-every-steps", "12"),
]


def test_student_comes_closer_replays_and_refuses_another_teacher(
    tmp_path: Path, typed: Typed
) -> None:
    done = cli("sft", "--name", "taught", "--sft.num-steps", "150", *SIZES, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert typed("export", "taught", "teacher", cwd=tmp_path).returncode == 0
    done = cli("train", "distillation", "--name", "student", *STUDENT, *SIZES, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = areal_flow.open_run(tmp_path / "runs" / "student")
    divergence = run.steps()["kl_policy_reference"].dropna().tolist()
    assert len(divergence) == 24
    assert sum(divergence[-2:]) < 0.75 * sum(divergence[:2])
    check_accounting(RunLayout((tmp_path / "runs" / "student").resolve()))
    replayed = typed("replay", "student", "--step", "14", cwd=tmp_path)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    with (tmp_path / "teacher" / "config.json").open("a") as config:
        config.write(" ")
    again = typed("train", "--resume", "student", "--num-steps", "25", cwd=tmp_path)
    assert again.returncode == 1
    assert "teacher/config.json: expected the content" in again.stderr
