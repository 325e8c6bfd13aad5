"""A run with a critic survives the end of its trainer and of its driver, and is replayed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from time import sleep

import psutil
import pytest

import areal_flow
from areal_flow.core.layout import RunLayout
from areal_flow.flow.recovery.replay import replay_step
from tests.integration.runs import check_accounting, cli, small_arguments, started_cli

pytestmark = pytest.mark.slow

SMALL = (
    *("--num-steps", "500", "--prompts.num-held-out", "0", "--sft.num-steps", "0"),
    *("--algorithm.name", "ppo_critic", "--algorithm.critic.learning-rate", "5e-3"),
    *("--trainer.checkpoint-every-steps", "4"),
)


def num_steps(layout: RunLayout) -> int:
    if not layout.steps.is_dir():
        return 0
    return max(0, len(areal_flow.open_run(layout.root).steps("arrow")) - 1)


def test_critic_is_restored_with_its_policy_and_replayed_to_the_bit(tmp_path: Path) -> None:
    layout = RunLayout((tmp_path / "runs" / "c").resolve())
    arguments = [*small_arguments(), *SMALL]
    with started_cli("train", "--name", "c", *arguments, cwd=tmp_path) as process:

        def reach(step: int) -> None:
            while num_steps(layout) < step:
                assert process.poll() is None, process.communicate()[0]
                sleep(0.1)

        reach(2)
        workers = psutil.Process(process.pid).children(recursive=True)
        (trainer,) = [worker for worker in workers if worker.name() == "trainer-0"]
        os.kill(trainer.pid, signal.SIGKILL)
        reach(6)
        os.killpg(process.pid, signal.SIGKILL)
    last = num_steps(layout)
    resumed = cli("train", "--resume", "c", "--num-steps", str(last + 2), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    check_accounting(layout)
    replay = replay_step(layout, step=last + 2, from_checkpoint=0)
    steps = [*replay.before, replay.compared]
    assert len(steps) == last + 2
    assert all(compared.equal for compared in steps)
    assert all("critic_loss" in compared.recorded.metrics.metrics for compared in steps)
