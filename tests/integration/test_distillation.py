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


LIKELY_TOKENS = [
    *("--algorithm.reference-top-k", "4", "--algorithm.kl-in", "loss"),
]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a teacher."""
    cwd = tmp_path_factory.mktemp("distillation")
    done = cli("sft", "--name", "taught", "--sft.num-steps", "150", *SIZES, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    assert cli("export", "taught", "teacher", cwd=cwd).returncode == 0
    return cwd


@pytest.mark.parametrize(
    ("name", "settings"), [("student", []), ("close", LIKELY_TOKENS)], ids=["sampled", "likely"]
)
def test_student_comes_closer_and_replays(
    name: str, settings: list[str], taught: Path, typed: Typed
) -> None:
    done = cli("train", "distillation", "--name", name, *STUDENT, *SIZES, *settings, cwd=taught)
    assert done.returncode == 0, done.stdout + done.stderr
    run = areal_flow.open_run(taught / "runs" / name)
    divergence = run.steps()["kl_policy_reference"].dropna().tolist()
    assert len(divergence) == 24
    assert sum(divergence[-2:]) < 0.75 * sum(divergence[:2])
    check_accounting(RunLayout((taught / "runs" / name).resolve()))
    replayed = typed("replay", name, "--step", "14", cwd=taught)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def test_another_teacher_is_refused(taught: Path, typed: Typed) -> None:
    with (taught / "teacher" / "config.json").open("a") as config:
        config.write(" ")
    again = typed("train", "--resume", "student", "--num-steps", "25", cwd=taught)
    assert again.returncode == 1
    assert "teacher/config.json: expected the content" in again.stderr
