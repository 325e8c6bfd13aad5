"""Forks and learning-rate schedules, by command lines alone; all share one small parent."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from time import sleep

import pytest

import areal_flow
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import hold_lease
from areal_flow.policy.checkpoints import list_checkpoints
from tests.integration.conftest import Typed
from tests.integration.runs import check_accounting, done, small_arguments, started_cli

pytestmark = pytest.mark.walk

NUM_STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of three steps, fine-tuned first, and checkpoints of 0, 2 and 3."""
    cwd = tmp_path_factory.mktemp("fork")
    given = [*small_arguments(), "--num-steps", str(NUM_STEPS), "--prompts.num-held-out", "8"]
    rate = ("--trainer.learning-rate", "1e-3", "--trainer.num-warmup-steps", "0")
    falling = (*rate, "--trainer.learning-rate-schedule", "cosine")
    done(cwd, "train", "--name", "parent", *given, *falling)
    return cwd


def run(folder: Path, name: str) -> RunLayout:
    return RunLayout((folder / "runs" / name).resolve())


def hashes(folder: Path, name: str) -> list[str]:
    steps = areal_flow.open_run(run(folder, name).root).steps()
    return [str(text) for text in steps.sort_values("step").weights_hash]


def test_fork_of_a_step_without_a_checkpoint_trains_on_with_other_settings(folder: Path) -> None:
    assert list_checkpoints(run(folder, "parent").checkpoints) == [0, 2, 3]
    given = ("--num-steps", "2", "--controller.group-size", "8", "--algorithm.name", "gspo")
    output = done(folder, "train", "--from", "parent@1", "--name", "child", *given)
    assert "run parent: replaying step 1/1" in output
    assert "Forked from step 1 of run parent: its weights; optimizer kept" in output
    assert "supervised fine-tuning" not in output
    assert "Forked from step 1 of run parent" in run(folder, "child").log.read_text()
    assert hashes(folder, "child")[0] == hashes(folder, "parent")[1]
    check_accounting(run(folder, "child"))
    check_accounting(run(folder, "parent"))
    trajectories = areal_flow.open_run(run(folder, "child").root).trajectories()
    assert trajectories.groupby("group_id").size().max() == 8


def test_child_is_replayed_from_its_step_0_bit_for_bit(folder: Path) -> None:
    output = done(folder, "replay", "child", "--step", "2", "--from", "0")
    assert "step 2, from checkpoint 0; step 1 on the way: 1 of 1 equal" in output
    assert "equal to its record, bit for bit" in output


def test_lineage_shows_the_parent_and_its_chain(folder: Path) -> None:
    of_parent = hashes(folder, "parent")
    lineage = json.loads(done(folder, "lineage", "child", "--json"))
    (link,) = lineage["forked_from"]
    assert (link["name"], link["step"], link["weights_hash"]) == ("parent", 1, of_parent[1])
    assert link["ledger"]["genesis_hash"] == of_parent[0]
    assert lineage["genesis_hash"] == of_parent[1]
    assert all(check["holds"] for check in lineage["checks"])
    shown = " ".join(done(folder, "lineage", "child").split())
    assert "forked from step 1 of run parent, optimizer kept" in shown
    assert f"chain from the genesis {of_parent[0]}, unbroken" in shown


def test_fork_that_was_killed_before_its_version_0_goes_on(folder: Path) -> None:
    """It is a fork of a fork whose driver is still running."""
    killed = run(folder, "killed")
    given = ("--from", "child", "--name", "killed", "--num-steps", "1", "--reset-optimizer")
    with (
        hold_lease(run(folder, "child").writers),
        started_cli("train", *given, cwd=folder) as process,
    ):
        while not killed.steps.is_dir():
            assert process.poll() is None
            sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    output = done(folder, "check", "killed")
    assert "not begun to train" in output
    assert "killed: clean" in output
    done(folder, "train", "--resume", "killed")
    check_accounting(killed)
    assert hashes(folder, "killed")[0] == hashes(folder, "child")[2]
    first, second = areal_flow.open_run(killed.root).lineage(1).forked_from
    assert (first["name"], first["step"], first["optimizer"]) == ("child", 2, "fresh, as asked for")
    assert (second["name"], second["step"]) == ("parent", 1)


def test_schedule_keeps_its_horizon_when_a_resume_goes_on_beyond_it(folder: Path) -> None:
    """And a replay from step 0 computes the recorded rates again."""
    done(folder, "train", "--resume", "parent", "--num-steps", str(NUM_STEPS + 1))
    steps = areal_flow.open_run(run(folder, "parent").root).steps().sort_values("step")
    assert steps.learning_rate.tolist()[1:] == pytest.approx([1e-3, 7.575e-4, 2.725e-4, 3e-5])
    output = done(folder, "replay", "parent", "--step", str(NUM_STEPS + 1), "--from", "0")
    assert "steps 1 to 3 on the way: 3 of 3 equal" in output
    assert "equal to its record, bit for bit" in output
    of_child = areal_flow.open_run(run(folder, "child").root).steps().sort_values("step")
    assert of_child.learning_rate.tolist()[1:] == pytest.approx([1e-3, 5.15e-4])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "parent@9"], "run parent has no step 9: expected a step from 0 to"),
        (["--from", "nobody"], "expected a run named 'nobody'"),
        (["--from", "parent", "--model", "tiny"], "--model: a fork keeps the model of run parent"),
        (["--from", "parent", "--sft.num-steps", "3"], "--sft.num-steps: a fork keeps"),
        (["--from", "parent", "--resume", "parent"], "expected one of a recipe, --resume and --fr"),
        (["--from", "parent", "--trainer.lr", "1"], "Did you mean --trainer.learning-rate"),
        (["--from", "parent", "--generation.max-model-len", "64"], "max_model_len"),
        (["--from", "parent", "--prompts", "none.jsonl"], "none.jsonl"),
        (["--reset-optimizer"], "--reset-optimizer goes with --from"),
    ],
)
def test_mistakes_are_reported_before_anything_starts_and_leave_no_run(
    folder: Path, typed: Typed, arguments: list[str], message: str
) -> None:
    ended = typed("train", "--name", "wrong", *arguments, cwd=folder)
    assert ended.returncode in (1, 2)
    assert message in ended.stderr
    assert "Dask dashboard" not in ended.stdout
    assert not (folder / "runs" / "wrong").exists()
