"""Reward and pass are two things, as a user's command lines show them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from statistics import fmean

import pytest

import areal_flow
from areal_flow.pass_rates import PASS_RATE
from tests.integration.runs import check_accounting, cli, small_arguments

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


def test_evaluation_from_python_has_both(run: areal_flow.Run) -> None:
    found = areal_flow.evaluate(run, num_prompts=16)
    rewards = [answer["reward"] for answer in found.answers]
    overall = found.table.overall
    assert overall.reward.reward_mean == pytest.approx(fmean(rewards))
    assert overall.passed.pass_rate == pytest.approx(fmean(reward > 0.5 for reward in rewards))
