"""One run with rewards in quarters, killed, resumed and inspected, by command lines alone."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

import areal_flow
from areal_flow.core.layout import RunLayout
from areal_flow.core.pass_rates import PASS_RATE
from pipelines.console.run_log import logged_warnings
from tests.integration.runs import (
    ENVIRONMENT,
    check_accounting,
    cli,
    done,
    small_arguments,
    started_cli,
)

pytestmark = pytest.mark.walk

TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ?")
NUM_STEPS = 7


@dataclass(frozen=True)
class Journey:
    """A run whose driver was killed after two steps and resumed to its end; its verifier gives
    0, 0.25, 0.5, 0.75 or 1."""

    folder: Path
    layout: RunLayout
    before: str
    """What the first driver printed, and the second one."""
    after: str
    page_of_the_killed: str

    @property
    def run(self) -> areal_flow.Run:
        return areal_flow.open_run(self.layout.root)


@pytest.fixture(scope="module")
def journey(tmp_path_factory: pytest.TempPathFactory) -> Journey:
    cwd = tmp_path_factory.mktemp("workspace")
    given = ("--num-steps", str(NUM_STEPS), "--evaluation.every-steps", "2")
    arguments = [*small_arguments(), *given, "--trainer.checkpoint-every-steps", "100"]
    before = []
    with started_cli("train", "--name", "r", *arguments, cwd=cwd) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            before.append(line)
            if line.startswith("step 2/"):
                break
    layout = RunLayout(cwd / "runs" / "r")
    page = areal_flow.report(layout.root, against=layout.root, prices={"cpu": 2.0}).read_text()
    layout.report.unlink()
    resumed = cli("train", "--resume", "r", cwd=cwd)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    return Journey(cwd, layout, "".join(before), resumed.stdout, page)


def test_log_has_every_line_of_both_drivers(journey: Journey) -> None:
    text = journey.layout.log.read_text()
    logged = [TIME.sub("", line, count=1) for line in text.splitlines()]
    before, after = journey.before.splitlines(), journey.after.splitlines()
    assert logged[: len(before)] == before
    assert logged[-len(after) :] == after
    assert "resumed by driver 2" in after[0]
    assert "\x1b" not in text


def test_each_phase_shows_its_progress(journey: Journey) -> None:
    for line in ("Starting 3 workers", "supervised fine-tuning 20/20", "answered 64/64"):
        assert line in journey.before
    assert re.search(r"replayed (\d+)/\1\n", journey.after)
    assert f"Training from version 0 to {NUM_STEPS}" in journey.before


def test_page_of_a_killed_run_says_crashed_and_the_final_one_finished(journey: Journey) -> None:
    layout = journey.layout
    assert ">crashed</span>" in journey.page_of_the_killed
    assert "<td>costs are in</td><td>money</td><td>money</td>" in journey.page_of_the_killed
    assert journey.page_of_the_killed.count("<th>r</th>") == 2, "beside itself"
    assert journey.after.splitlines()[-1] == f"The run on one page: {layout.report.resolve()}"
    page = layout.report.read_text()
    assert ">finished</span>" in page
    assert "driver 2 began" in page
    assert all(what in page for _, what in logged_warnings(layout.log)[:3])


def test_printed_pandas_line_shows_prompts_completions_and_rewards(journey: Journey) -> None:
    (typed,) = re.findall(r"^  (\S*python -c .*)$", journey.after, re.MULTILINE)
    shown = subprocess.run(
        typed,
        shell=True,
        cwd=journey.folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    # A completion may hold characters that `splitlines` takes for the end of a line.
    head, *rows = shown.stdout.rstrip("\n").split("\n")
    assert head.split() == ["prompt", "completion", "reward"]
    assert len(rows) == 5
    assert all("=" in row for row in rows)


def test_evaluation_prints_its_model_and_its_progress(journey: Journey) -> None:
    ended = cli("evaluate", "r", "--num-prompts", "40", "--json", cwd=journey.folder)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    title = f"r (step {NUM_STEPS} of run r)"
    assert (result["model"], result["overall"]["n"]) == (title, 40)
    for line in ("Starting 3 workers", f"Evaluating {title} on 40 held-out pro", "answered 40/40"):
        assert ended.stderr.count(line) == 1


def test_verdicts_are_those_of_the_threshold(journey: Journey) -> None:
    query = "SELECT DISTINCT reward, verdict, passed FROM trajectories ORDER BY reward"
    rows = journey.run.database().sql(query).fetchall()
    assert {0.25, 0.5, 0.75} <= {reward for reward, *_ in rows}
    for reward, verdict, passed in rows:
        assert (verdict, passed) == (("correct", True) if reward > 0.5 else ("incorrect", False))


def test_pass_rate_of_a_step_is_not_its_mean_reward(journey: Journey) -> None:
    steps = journey.run.steps(where="step > 0").set_index("step")
    by_view = journey.run.database().sql(
        "SELECT step, avg(reward), avg(passed::INT) FROM trajectories WHERE status = 'trained' "
        "GROUP BY step"
    )
    for step, reward_mean, pass_rate in by_view.fetchall():
        assert steps.reward_mean[step] == pytest.approx(reward_mean)
        assert steps[PASS_RATE][step] == pytest.approx(pass_rate)
    check_accounting(journey.layout)


def test_output_labels_reward_and_pass(journey: Journey) -> None:
    first = journey.run.steps(where="step = 1").iloc[0]
    line = f"step 1/{NUM_STEPS}  reward {first.reward_mean:.3f}  pass {first[PASS_RATE]:.3f}"
    assert line in journey.before
    interval = r"\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]"
    for label, kind in (("pass rate  ", "Wilson"), ("mean reward", "normal")):
        assert re.search(rf"{label} {interval} -> {interval} \(95%, {kind}\)", journey.after)


def test_summary_has_both_with_their_intervals(journey: Journey) -> None:
    answers = journey.run.evaluations()
    for moment in ("before", "after"):
        rewards = answers[answers.evaluation == moment].reward
        scores = journey.run.summary()[f"held_out_{moment}"]
        assert scores["reward_mean"] == pytest.approx(rewards.mean())
        assert scores["pass_rate"] == pytest.approx((rewards > 0.5).mean())
        assert scores["reward_mean_low"] < scores["reward_mean"] < scores["reward_mean_high"]
    assert set(answers.verifier) == set(journey.run.trajectories(columns=["verifier"]).verifier)


def test_evaluation_beside_training_is_made_once_though_its_driver_was_killed(
    journey: Journey,
) -> None:
    assert "evaluation step-0000000" in journey.after
    counts = journey.run.evaluations().groupby("evaluation").prompt_id.agg(["size", "nunique"])
    assert set(counts["size"]) == set(counts["nunique"]) == {64}
    beside = {name for name in counts.index if name.startswith("step-")}
    assert beside
    assert set(counts.index) == {"before", "after", *beside}
    assert beside <= {f"step-{step:08d}" for step in (2, 4, 6)}


def test_evaluation_beside_training_says_which_versions_answered(journey: Journey) -> None:
    query = """
        SELECT evaluation, min(policy_version), max(policy_version),
               min(list_min(list_transform(version_spans, lambda span: span.version)))
        FROM evaluations GROUP BY evaluation
    """
    for name, version, newest, oldest in journey.run.database().sql(query).fetchall():
        assert version == newest == oldest
        if name.startswith("step-"):
            assert version >= int(name.removeprefix("step-"))


def test_several_samples_give_pass_at_k_from_the_command_line(journey: Journey) -> None:
    settings = ["--num-steps", "1", "--prompts.num-held-out", "16"]
    evaluation = ["--evaluation.num-samples", "4", "--evaluation.temperature", "0.8"]
    given = [*small_arguments(), *settings, *evaluation]
    output = done(journey.folder, "train", "--name", "sampled", *given)
    assert "Held-out prompts, 4 samples each: pass@2 0." in output
    run = areal_flow.open_run(journey.folder / "runs" / "sampled")
    answers = run.evaluations()
    after = answers[answers.evaluation == "after"].assign(passed=lambda rows: rows.reward > 0.5)
    by_prompt = after.groupby("prompt_id").passed
    scores = run.summary()["held_out_after"]
    assert (scores["n"], scores["num_samples"], len(after)) == (16, 4, 64)
    assert scores["pass_rate"] == pytest.approx(by_prompt.mean().mean())
    assert scores["pass_at_4"] == pytest.approx(by_prompt.any().mean())


def test_training_ends_on_a_plateau_and_so_does_its_resumption(journey: Journey) -> None:
    """Nothing passes a threshold of 2, so the first evaluation beside training is no better."""
    plateau = ["--evaluation.every-steps", "1", "--evaluation.early-stopping-patience", "1"]
    few = ["--num-steps", "500", "--pass-threshold", "2", "--prompts.num-held-out", "16"]
    given = [*small_arguments(), *few, *plateau, "--evaluation.temperature", "0"]
    output = done(journey.folder, "train", "--name", "flat", *given)
    assert "No better pass rate in 1 evaluations: training ends" in output
    run = areal_flow.open_run(journey.folder / "runs" / "flat")
    num_steps = run.summary()["num_steps"]
    assert 1 <= num_steps < 500
    done(journey.folder, "train", "--resume", "flat")
    assert run.summary()["num_steps"] == num_steps
    answers = run.evaluations()
    assert not answers.duplicated(["evaluation", "prompt_id"]).any()
