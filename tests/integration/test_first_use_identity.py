"""Identity of a run, by command lines alone: killed in its warm-up, other verifier, removed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from time import sleep
from typing import Any

import pytest

import areal_flow
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import hold_lease
from areal_flow.policy.checkpoints import list_checkpoints
from tests.integration.runs import done, small_arguments, started_cli

pytestmark = pytest.mark.walk

GRADER = '''"""A grader of the user's own."""


def grade(prompt, completion, answer):
    return float(len(completion) % 3 == {rest})
'''
NUM_FINE_TUNING = 300
GIVEN = [
    *small_arguments(),
    *("--num-steps", "0", "--data", "prompts.jsonl", "--prompts.num-held-out", "32"),
    *("--sft.path", "rows.jsonl", "--sft.num-steps", str(NUM_FINE_TUNING)),
    *("--sft.checkpoint-every-steps", "20", "--controller.batch-size", "16"),
    *("--tracking.enabled", "true", "--rewards", '[{verifier = "graders:grade"}]'),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with prompts, fine-tuning rows and a verifier."""
    cwd = tmp_path_factory.mktemp("identity")
    write_rows(cwd / "prompts.jsonl", [{"question": f"{n} + 1 =", "answer": n} for n in range(200)])
    write_rows(cwd / "rows.jsonl", [{"prompt": f"{n} + 1 =", "completion": " 1"} for n in range(9)])
    (cwd / "graders.py").write_text(GRADER.format(rest=0))
    return cwd


@pytest.fixture(scope="module")
def run(folder: Path) -> RunLayout:
    return RunLayout((folder / "runs" / "mine").resolve())


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps({k: str(v) for k, v in r.items()}) + "\n" for r in rows))


def test_run_that_was_killed_in_its_warm_start_goes_on(folder: Path, run: RunLayout) -> None:
    with started_cli("train", "--name", "mine", *GIVEN, cwd=folder) as process:
        while not list_checkpoints(run.sft_checkpoints):
            assert process.poll() is None
            sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    taken = list_checkpoints(run.sft_checkpoints)[-1]
    assert taken < NUM_FINE_TUNING
    output = done(folder, "check", "mine")
    assert f"fine-tuning at step {taken} of {NUM_FINE_TUNING}; not begun to train" in output
    assert "mine: clean" in output
    output = done(folder, "train", "--resume", "mine")
    first = next(line for line in output.splitlines() if "supervised fine-tuning" in line)
    assert int(first.split("fine-tuning ")[1].split("/")[0]) > taken, "it began again"
    assert "mine: clean. Checked: 1 steps" in done(folder, "check", "mine")


def test_version_0_that_no_checkpoint_has_is_made_again(folder: Path, run: RunLayout) -> None:
    shutil.rmtree(run.checkpoints)
    done(folder, "train", "--resume", "mine", "--num-steps", "1")
    assert "mine: clean. Checked: 2 steps" in done(folder, "check", "mine")


def test_verifier_that_changed_is_refused_before_a_cluster_starts(
    folder: Path, run: RunLayout
) -> None:
    state = run.state.read_text()
    (folder / "graders.py").write_text(GRADER.format(rest=1))
    output = done(folder, "train", "--resume", "mine", "--num-steps", "2", code=1)
    assert "the verifier: expected graders:grade@" in output
    assert "graders.py; restore it, or go on with --accept-verifier" in output
    assert "Dask dashboard" not in output
    assert run.state.read_text() == state


def test_accepted_verifier_is_marked_and_nothing_is_compared_across_it(
    folder: Path, run: RunLayout
) -> None:
    write_rows(folder / "prompts.jsonl", [{"question": "1 + 1 =", "answer": 2}])
    done_again = ("train", "--resume", "mine", "--num-steps", "2", "--accept-verifier")
    output = done(folder, *done_again)
    assert "prompts.jsonl changed since run mine was prepared" in output
    assert "The verifier changed, and nothing is compared across it:" in output
    assert "Held-out prompts" not in output
    assert json.loads(run.summary.read_text())["held_out_before"] is None
    opened = areal_flow.open_run(run.root)
    by_step = opened.steps().sort_values("step").verifier.tolist()
    assert by_step[0] == by_step[1] != by_step[2]
    evaluations = opened.evaluations().groupby("policy_version").verifier.unique()
    assert [*evaluations[0]] == [by_step[0]]
    assert [*evaluations[2]] == [by_step[2]]
    assert "mine: clean. Checked: 3 steps" in done(folder, "check", "mine")
    lineage = json.loads(done(folder, "lineage", "mine", "--json"))
    spans = [
        (verifier["verifier"], verifier["first_step"], verifier["last_step"])
        for verifier in lineage["verifiers"]
    ]
    assert spans == [(by_step[1], 1, 1), (by_step[2], 2, 2)]


def test_prompts_of_the_run_that_changed_are_refused(folder: Path, run: RunLayout) -> None:
    kept = run.train_prompts.read_bytes()
    run.train_prompts.write_bytes(run.held_out_prompts.read_bytes())
    output = done(folder, "train", "--resume", "mine", "--num-steps", "3", code=1)
    assert "train.arrow: expected the content" in output
    assert "Dask dashboard" not in output
    assert "input-changed" in done(folder, "check", "mine", code=1)
    run.train_prompts.write_bytes(kept)


def test_run_is_removed_with_its_registry_entries_after_asking(
    folder: Path, run: RunLayout
) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{folder / 'runs' / 'mlflow.db'}"
    client = MlflowClient(uri, uri)
    assert client.get_model_version_by_alias("areal-flow", "mine").tags["step"] == "2"
    output = done(folder, "runs", "remove", "mine", code=2)
    assert "expected --yes" in output
    with hold_lease(run.writers):
        output = done(folder, "runs", "remove", "mine", "--yes", code=1)
        assert f"held by process {os.getpid()}" in output
    assert run.steps.is_dir()
    assert "removed run mine and its model versions: " in done(
        folder, "runs", "remove", "mine", "--yes"
    )
    assert not list((folder / "runs").glob("*mine*"))
    assert not client.search_model_versions("name = 'areal-flow'")
    assert "no runs in" in done(folder, "runs")
