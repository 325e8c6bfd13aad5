"""Workers under a real Slurm train a policy; a cancelled job and a killed driver cost no data."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest

from tests.chaos import SETTINGS
from tests.integration.runs import ENVIRONMENT
from tests.slurmd import job_numbers, nodes_of_steps, running_slurm
from tests.struck_run import StruckRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORKERS = ("trainer-0", "generator-0", "generator-1", "reward-0")
ON_SLURM = {
    **SETTINGS,
    "cluster.launcher": "slurm",
    "cluster.num-generators": "2",
    "cluster.slurm": '{all = ["--time=60"], reward = ["--comment=scores"]}',
    "cluster.heartbeat-timeout-s": "10",
}
ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "pipelines.cli.main")


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with running_slurm(tmp_path_factory.mktemp("slurm")):
        yield


@pytest.mark.usefixtures("slurm")
def test_cancelled_generator_and_killed_driver_lose_nothing(tmp_path: Path) -> None:
    run = StruckRun(tmp_path)
    try:
        run.begin(ON_SLURM)
        assert len(job_numbers(*WORKERS)) == len(WORKERS)
        (cancelled,) = job_numbers("generator-1")
        subprocess.run(["scancel", cancelled], check=True)
        run.wait_until(
            lambda: job_numbers("generator-1") not in ([], [cancelled]), "another job for it"
        )
        run.wait_until(lambda: len(run.live_workers("generator")) == 2, "both generators")
        run.wait_for_steps(2, "steps of both")
        run.audit()
        run.kill_driver()
        until(lambda: not job_numbers(), "the jobs to end with their driver")
        run.audit()
        run.resume()
        run.wait_for_steps(2, "steps after the resume")
        assert run.stop() == 143
        until(lambda: not job_numbers(), "the jobs to end with the run")
        log = run.log.read_text()
        assert f"generator-1 died (Slurm job {cancelled}: CANCELLED)" in log, log
        assert set(WORKERS) <= {
            path.name.rpartition("-")[0] for path in run.layout.jobs.glob("*.log")
        }
    finally:
        run.close()
    run.audit()
    subprocess.run([*COMMAND, "check", "struck"], cwd=tmp_path, env=environment(), check=True)


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("launcher", ["slurm", "srun"])
def test_driver_runs_as_a_job_itself(launcher: str, tmp_path: Path) -> None:
    settings = {**ON_SLURM, "cluster.launcher": launcher}
    options = [text for name, value in settings.items() for text in (f"--{name}", value)]
    driver = [*COMMAND, "train", "--name", "inner", "--num-steps", "3", *options]
    submit = ["sbatch", "--wait", "--output=driver.log", "--cpus-per-task=2"]
    script = f"#!/bin/bash\nexec {shlex.join(driver)}\n"
    done = subprocess.run(
        submit, input=script, text=True, cwd=tmp_path, env=environment(), check=False
    )
    assert done.returncode == 0, (tmp_path / "driver.log").read_text()
    subprocess.run([*COMMAND, "check", "inner"], cwd=tmp_path, env=environment(), check=True)


def test_one_job_has_workers_on_two_nodes_and_its_script_resumes_the_run(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = {**SETTINGS, "cluster.num-generators": "3"}
    options = [text for name, value in settings.items() for text in (f"--{name}", value)]
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "areal-flow"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    program.chmod(0o700)
    log, runs = tmp_path / "driver.log", tmp_path / "runs"
    submit = ["sbatch", "--time=60", f"--output={log}", "--open-mode=append"]
    submit += [str(ROOT / "infra/slurm/nodes.sh"), "arithmetic", str(runs), "both", *options]
    paths = f"{program.parent}{os.pathsep}{os.environ['PATH']}"

    def train_for_steps() -> None:
        """Submit the script; wait for two steps of this driver."""
        subprocess.run(submit, cwd=tmp_path, env=environment() | {"PATH": paths}, check=True)
        num_printed = len(log.read_text()) if log.exists() else 0
        until(
            lambda: log.exists() and log.read_text()[num_printed:].count("\nstep ") >= 2,
            "two steps",
        )

    def end(*signal: str) -> None:
        subprocess.run(["scancel", *signal, *job_numbers()], check=True)
        until(lambda: not job_numbers(), "the job to end")

    with running_slurm(tmp_path_factory.mktemp("slurm"), "n1", "n2"):
        train_for_steps()
        assert nodes_of_steps() == ["n1", "n1", "n1", "n2", "n2"]
        end("--signal=KILL", "--full")
        for stop in ((), ("--signal=TERM", "--batch")):
            train_for_steps()
            end(*stop)
            state = json.loads((runs / "both" / "state.json").read_text())["state"]
            assert state == "stopped", log.read_text()
    subprocess.run([*COMMAND, "check", "both"], cwd=tmp_path, env=ENVIRONMENT, check=True)


def environment() -> dict[str, str]:
    return {**ENVIRONMENT, "SLURM_CONF": os.environ["SLURM_CONF"]}


def until(happened: Callable[[], bool], what: str) -> None:
    deadline = monotonic() + 60
    while not happened():
        assert monotonic() < deadline, f"waited 60 s for {what}"
        sleep(0.2)
