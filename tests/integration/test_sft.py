"""`areal-flow sft`: killed and resumed bit for bit; its result can be trained further."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from time import sleep

import pytest

from areal_flow.core.layout import RunLayout
from areal_flow.policy.checkpoints import list_checkpoints, read_checkpoint_state
from tests.integration.conftest import Typed
from tests.integration.runs import check_accounting, cli, small_arguments, started_cli

NUM_STEPS = 600
ROWS = [{"prompt": f"{n} + {n} =", "completion": f" #### {2 * n}"} for n in range(50)]
ARGUMENTS = [
    *("--data", "rows.jsonl", "--sft.num-steps", str(NUM_STEPS), "--sft.batch-size", "16"),
    *("--sft.learning-rate", "1e-3", "--sft.checkpoint-every-steps", "100"),
    *("--tracking.enabled", "false"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where a policy was fine-tuned without interruption."""
    cwd = tmp_path_factory.mktemp("sft")
    (cwd / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    done = cli("sft", "--name", "straight", *ARGUMENTS, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"supervised fine-tuning {NUM_STEPS}/{NUM_STEPS}" in done.stdout
    checkpoint = f"runs/straight/sft/checkpoints/{NUM_STEPS:08d}"
    assert f"areal-flow train --data PROMPTS.jsonl --model {checkpoint}" in done.stdout
    return cwd


def result_of(folder: Path, name: str) -> str:
    root = RunLayout(folder / "runs" / name).sft_checkpoints
    assert list_checkpoints(root)[-1] == NUM_STEPS
    return read_checkpoint_state(root / f"{NUM_STEPS:08d}").weights_hash


@pytest.mark.slow
def test_killed_and_resumed_makes_the_same_bits(folder: Path) -> None:
    checkpoints = RunLayout(folder / "runs" / "killed").sft_checkpoints
    with started_cli("sft", "--name", "killed", *ARGUMENTS, cwd=folder) as process:
        while not list_checkpoints(checkpoints):
            assert process.poll() is None
            sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert NUM_STEPS not in list_checkpoints(checkpoints)
    done = cli("sft", "--resume", "killed", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert result_of(folder, "killed") == result_of(folder, "straight")


@pytest.mark.slow
def test_result_is_a_model_that_is_trained_further(folder: Path) -> None:
    assert cli("export", "straight", "policy", cwd=folder).returncode == 0
    arguments = [*small_arguments(), "--num-steps", "1", "--prompts.num-held-out", "8"]
    done = cli("train", "--name", "further", "--model", "policy", *arguments, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "supervised fine-tuning" not in done.stdout
    check_accounting(RunLayout((folder / "runs" / "further").resolve()))


def test_recipe_without_rows_is_refused_and_the_name_stays_free(
    tmp_path: Path, typed: Typed
) -> None:
    done = typed("sft", "--name", "none", "--sft.num-steps", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert "expected sft.num_steps of 1 or more and sft.path" in done.stderr
    assert not (tmp_path / "runs" / "none").exists()


@pytest.mark.slow
def test_fine_tuning_is_not_resumed_by_train(folder: Path, typed: Typed) -> None:
    again = typed("train", "--resume", "straight", cwd=folder)
    assert again.returncode == 1
    assert "areal-flow train` prepared" in again.stderr
