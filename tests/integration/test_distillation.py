"""On-policy distillation: a student comes closer to its teacher, and its steps replay."""

from __future__ import annotations

from pathlib import Path

import pytest

import areal_flow
from areal_flow.core.layout import RunLayout
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


LIKELY_TOKENS = ("--algorithm.reference-top-k", "4", "--algorithm.kl-in", "loss")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a teacher."""
    cwd = tmp_path_factory.mktemp("distillation")
    done = cli("sft", "--name", "taught", "--sft.num-steps", "150", *SIZES, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    assert cli("export", "taught", "teacher", cwd=cwd).returncode == 0
    return cwd


@pytest.fixture(scope="module")
def student(folder: Path) -> RunLayout:
    return train_student("student", cwd=folder)


def train_student(name: str, *settings: str, cwd: Path) -> RunLayout:
    done = cli("train", "distillation", "--name", name, *STUDENT, *SIZES, *settings, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return RunLayout((cwd / "runs" / name).resolve())


def check_student_comes_closer_and_replays(layout: RunLayout, typed: Typed) -> None:
    divergence = areal_flow.open_run(layout.root).steps()["kl_policy_reference"].dropna().tolist()
    assert len(divergence) == 24
    assert sum(divergence[-2:]) < 0.75 * sum(divergence[:2])
    check_accounting(layout)
    replayed = typed("replay", layout.name, "--step", "14", cwd=layout.root.parents[1])
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def test_student_of_sampled_tokens_comes_closer_and_replays(
    student: RunLayout, typed: Typed
) -> None:
    check_student_comes_closer_and_replays(student, typed)


def test_student_of_likely_tokens_comes_closer_and_replays(folder: Path, typed: Typed) -> None:
    layout = train_student("close", *LIKELY_TOKENS, cwd=folder)
    check_student_comes_closer_and_replays(layout, typed)


def test_another_teacher_is_refused(folder: Path, student: RunLayout, typed: Typed) -> None:
    with (folder / "teacher" / "config.json").open("a") as config:
        config.write(" ")
    again = typed("train", "--resume", student.name, "--num-steps", "25", cwd=folder)
    assert again.returncode == 1
    assert "teacher/config.json: expected the content" in again.stderr
