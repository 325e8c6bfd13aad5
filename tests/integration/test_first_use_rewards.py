"""Reward and pass are two things, as a user's command lines show them."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path
from statistics import fmean

import pytest

import areal_flow
from areal_flow.evaluation.pass_rates import PASS_RATE
from areal_flow.run.layout import RunLayout
from tests.integration.runs import (
    check_accounting,
    cli,
    small_arguments,
    started_cli,
    step_reached,
)

pytestmark = pytest.mark.walk

LENGTHS = '[{verifier = "tests.integration.verifiers:reward_length"}]'
"""It gives 0, 0.25, 0.5, 0.75 or 1."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graded")


@pytest.fixture(scope="module")
def trained(workspace: Path) -> subprocess.CompletedProcess[str]:
    """Train a run whose verifier grades by quarters."""
    graded = [*small_arguments(), "--num-steps", "2", "--rewards", LENGTHS]
    done = cli("train", "--name", "graded", *graded, cwd=workspace)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def run(workspace: Path, trained: object) -> areal_flow.Run:
    return areal_flow.open_run(workspace / "runs" / "graded")


def test_verdicts_are_those_of_the_threshold(run: areal_flow.Run) -> None:
    query = "SELECT DISTINCT reward, verdict, passed FROM trajectories ORDER BY reward"
    found = run.database().sql(query).fetchall()
    assert {0.25, 0.5, 0.75} <= {reward for reward, *_ in found}
    for reward, verdict, passed in found:
        assert (verdict, passed) == (("right", True) if reward > 0.5 else ("wrong", False))


def test_pass_rate_of_a_step_is_not_its_mean_reward(run: areal_flow.Run) -> None:
    steps = run.steps(where="step > 0").set_index("step")
    by_view = run.database().sql(
        "SELECT step, avg(reward), avg(passed::INT) FROM trajectories WHERE status = 'trained' "
        "GROUP BY step"
    )
    for step, reward_mean, pass_rate in by_view.fetchall():
        assert steps.reward_mean[step] == pytest.approx(reward_mean)
        assert steps[PASS_RATE][step] == pytest.approx(pass_rate)
    check_accounting(run.layout)


def test_output_labels_reward_and_pass(
    run: areal_flow.Run, trained: subprocess.CompletedProcess[str]
) -> None:
    first = run.steps(where="step = 1").iloc[0]
    said = f"step 1/2  reward {first.reward_mean:.3f}  pass {first[PASS_RATE]:.3f}"
    assert said in trained.stdout
    interval = r"\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]"
    assert re.search(rf"pass rate   {interval} -> {interval} \(95%, Wilson\)", trained.stdout)
    assert re.search(rf"mean reward {interval} -> {interval} \(95%, normal\)", trained.stdout)


def test_summary_has_both_with_their_intervals(run: areal_flow.Run) -> None:
    answers = run.evaluations()
    for moment in ("before", "after"):
        rewards = answers[answers.evaluation == moment].reward
        found = run.summary()[f"held_out_{moment}"]
        assert found["reward_mean"] == pytest.approx(rewards.mean())
        assert found["pass_rate"] == pytest.approx((rewards > 0.5).mean())
        assert found["reward_mean_low"] < found["reward_mean"] < found["reward_mean_high"]
    assert set(answers.verifier) == set(run.trajectories(columns=["verifier"]).verifier)


def test_several_samples_give_pass_at_k_from_the_command_line(
    workspace: Path, trained: object
) -> None:
    settings = ["--num-steps", "1", "--prompts.num-held-out", "16", "--rewards", LENGTHS]
    evaluation = ["--evaluation.num-samples", "4", "--evaluation.temperature", "0.8"]
    arguments = [*small_arguments(), *settings, *evaluation]
    done = cli("train", "--name", "sampled", *arguments, cwd=workspace)
    assert done.returncode == 0, done.stderr
    assert "Held-out prompts, 4 samples each: pass@2 0." in done.stdout
    run = areal_flow.open_run(workspace / "runs" / "sampled")
    answers = run.evaluations()
    after = answers[answers.evaluation == "after"].assign(passed=lambda rows: rows.reward > 0.5)
    by_prompt = after.groupby("prompt_id").passed
    found = run.summary()["held_out_after"]
    assert (found["n"], found["num_samples"], len(after)) == (16, 4, 64)
    assert found["pass_rate"] == pytest.approx(by_prompt.mean().mean())
    assert found["pass_at_4"] == pytest.approx(by_prompt.any().mean())


def test_likeliest_answers_are_the_same_from_any_command(workspace: Path, trained: object) -> None:
    greedy = ["--evaluation.temperature", "0", "--prompts.num-held-out", "16"]
    arguments = [*small_arguments(), "--num-steps", "0", *greedy]
    done = cli("train", "--name", "greedy", *arguments, cwd=workspace)
    assert done.returncode == 0, done.stderr
    run = areal_flow.open_run(workspace / "runs" / "greedy")
    answers = run.evaluations(columns=["evaluation", "prompt_id", "completion"])
    assert len(answers.drop_duplicates(["prompt_id", "completion"])) == 16
    assert set(answers.evaluation) == {"before", "after"}


def test_evaluation_from_python_has_both(run: areal_flow.Run) -> None:
    found = areal_flow.evaluate(run, num_prompts=16)
    rewards = [answer["reward"] for answer in found.answers]
    overall = found.table.overall
    assert overall.reward.reward_mean == pytest.approx(fmean(rewards))
    assert overall.passed.pass_rate == pytest.approx(fmean(reward > 0.5 for reward in rewards))


@pytest.fixture(scope="module")
def resumed(workspace: Path) -> areal_flow.Run:
    """Kill a driver while it evaluates beside training, and let another one finish the run."""
    settings = ["--num-steps", "7", "--evaluation.every-steps", "2"]
    layout = RunLayout((workspace / "runs" / "killed").resolve())
    arguments = [*small_arguments(), *settings, "--rewards", LENGTHS]
    with started_cli("train", "--name", "killed", *arguments, cwd=workspace):
        asyncio.run(asyncio.wait_for(step_reached(layout, 2), 200))
    done = cli("train", "--resume", "killed", cwd=workspace)
    assert done.returncode == 0, done.stderr
    assert "evaluation step-0000000" in done.stdout
    return areal_flow.open_run(layout.root)


def test_evaluation_beside_training_is_made_once_though_its_driver_was_killed(
    resumed: areal_flow.Run,
) -> None:
    answers = resumed.evaluations()
    counts = answers.groupby("evaluation").prompt_id.agg(["size", "nunique"])
    assert set(counts["size"]) == set(counts["nunique"]) == {64}
    beside = {name for name in counts.index if name.startswith("step-")}
    assert beside
    assert set(counts.index) == {"before", "after", *beside}
    assert beside <= {f"step-{step:08d}" for step in (2, 4, 6)}
    check_accounting(resumed.layout)


def test_evaluation_beside_training_says_which_versions_answered(resumed: areal_flow.Run) -> None:
    query = """
        SELECT evaluation, min(policy_version), max(policy_version),
               min(list_min(list_transform(version_spans, lambda span: span.version)))
        FROM evaluations GROUP BY evaluation
    """
    for name, version, other, oldest in resumed.database().sql(query).fetchall():
        assert version == other == oldest
        if name.startswith("step-"):
            assert version >= int(name.removeprefix("step-"))


def test_training_ends_on_a_plateau_and_so_does_its_resumption(workspace: Path) -> None:
    """Nothing passes a threshold of 2, so the first evaluation beside training is no better."""
    plateau = ["--evaluation.every-steps", "1", "--evaluation.stop-after-plateau", "1"]
    few = ["--num-steps", "500", "--pass-threshold", "2", "--prompts.num-held-out", "16"]
    arguments = [*small_arguments(), *few, *plateau, "--rewards", LENGTHS]
    done = cli("train", "--name", "flat", *arguments, cwd=workspace)
    assert done.returncode == 0, done.stderr
    assert "No better pass rate in 1 evaluations: training ends" in done.stdout
    run = areal_flow.open_run(workspace / "runs" / "flat")
    num_steps = run.summary()["num_steps"]
    assert 1 <= num_steps < 500
    assert cli("train", "--resume", "flat", cwd=workspace).returncode == 0
    assert run.summary()["num_steps"] == num_steps
    answers = run.evaluations()
    assert not answers.duplicated(["evaluation", "prompt_id"]).any()
