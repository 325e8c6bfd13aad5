"""What a stranger sees of a run: its log, its page, its evaluations, its trajectories as text."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import areal_flow
from areal_flow.run.layout import RunLayout
from pipelines.console.run_log import logged_warnings
from tests.integration.runs import ENVIRONMENT, check_accounting, cli, small_arguments, started_cli

pytestmark = pytest.mark.walk

TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ?")


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run whose driver was killed after two steps, then resumed to its end."""
    cwd = tmp_path_factory.mktemp("workspace")
    arguments = [*small_arguments(), "--trainer.checkpoint-every-steps", "100"]
    with started_cli("train", "--name", "r", *arguments, cwd=cwd) as driver:
        assert driver.stdout is not None
        before = []
        for line in driver.stdout:
            before.append(line)
            if line.startswith("step 2/"):
                break
    (cwd / "before.txt").write_text("".join(before))
    layout = RunLayout(cwd / "runs" / "r")
    (cwd / "killed.html").write_text(areal_flow.report(layout.root).read_text())
    layout.report.unlink()
    done = cli("train", "--resume", "r", cwd=cwd)
    (cwd / "after.txt").write_text(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return cwd


@pytest.fixture(scope="module")
def layout(killed_and_resumed: Path) -> RunLayout:
    return RunLayout(killed_and_resumed / "runs" / "r")


def test_log_has_every_line_of_both_drivers(killed_and_resumed: Path, layout: RunLayout) -> None:
    logged = [TIME.sub("", line, count=1) for line in layout.log.read_text().splitlines()]
    before = (killed_and_resumed / "before.txt").read_text().splitlines()
    after = (killed_and_resumed / "after.txt").read_text().splitlines()
    assert logged[: len(before)] == before
    assert logged[-len(after) :] == after
    assert "resumed by driver 2" in after[0]
    assert "\x1b" not in layout.log.read_text()


def test_each_phase_says_how_far_it_is(killed_and_resumed: Path) -> None:
    before = (killed_and_resumed / "before.txt").read_text()
    after = (killed_and_resumed / "after.txt").read_text()
    for said in ("Starting 3 workers", "supervised fine-tuning 20/20", "answered 64/64"):
        assert said in before
    assert re.search(r"replayed (\d+)/\1\n", after)
    assert "Training from version 0 to 4" in before


def test_page_of_a_killed_run_says_crashed_and_the_final_one_finished(
    killed_and_resumed: Path, layout: RunLayout
) -> None:
    assert ">crashed</span>" in (killed_and_resumed / "killed.html").read_text()
    after = (killed_and_resumed / "after.txt").read_text()
    assert after.splitlines()[-1] == f"The run on one page: {layout.report.resolve()}"
    page = layout.report.read_text()
    assert ">finished</span>" in page
    assert "driver 2 began" in page
    assert all(what in page for _, what in logged_warnings(layout.log)[:3])


def test_printed_pandas_line_shows_prompts_completions_and_rewards(
    killed_and_resumed: Path, layout: RunLayout
) -> None:
    check_accounting(layout)
    after = (killed_and_resumed / "after.txt").read_text()
    (typed,) = re.findall(r"^  (\S*python -c .*)$", after, re.MULTILINE)
    done = subprocess.run(
        typed,
        shell=True,
        cwd=killed_and_resumed,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    # A completion may hold characters that `splitlines` takes for the end of a line.
    head, *rows = done.stdout.rstrip("\n").split("\n")
    assert head.split() == ["prompt", "completion", "reward"]
    assert len(rows) == 5
    assert all("=" in row for row in rows)


def test_evaluation_says_what_it_evaluates_and_how_far_it_is(killed_and_resumed: Path) -> None:
    done = cli("evaluate", "r", "--num-prompts", "40", "--json", cwd=killed_and_resumed)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["model"], found["overall"]["n"]) == ("r (step 4 of run r)", 40)
    evaluating = "Evaluating r (step 4 of run r) on 40 held-out prompts"
    for said in ("Starting 3 workers", evaluating, "answered 40/40"):
        assert done.stderr.count(said) == 1


def test_user_interface_over_no_runs_says_so_and_leaves_nothing_behind(
    killed_and_resumed: Path, tmp_path: Path
) -> None:
    done = cli("ui", "--runs", killed_and_resumed / "nowhere", cwd=tmp_path)
    assert done.returncode == 1
    assert "mlflow.db, found none" in done.stderr
    assert list(tmp_path.iterdir()) == []
