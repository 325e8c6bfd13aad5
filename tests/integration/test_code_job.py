"""The shipped job whose completions run in the sandbox."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from time import sleep

import pytest

import areal_flow
from areal_flow.core.layout import RunLayout
from areal_flow.flow.recovery.replay import replay_step
from areal_flow.sandboxes.pool import choose_tier
from areal_flow.sandboxes.run import SandboxError
from tests.integration.runs import check_accounting, done, started_cli

pytestmark = pytest.mark.slow

SMALL = (
    *("--num-steps", "4", "--prompts.num-held-out", "8", "--prompts.num-prompts", "400"),
    *("--sft.num-steps", "60", "--controller.batch-size", "32", "--controller.group-size", "4"),
    *("--trainer.checkpoint-every-steps", "2", "--tracking.enabled", "false"),
)


def test_job_code_is_killed_resumed_audited_and_replayed(tmp_path: Path) -> None:
    try:
        choose_tier()
    except SandboxError as error:
        pytest.skip(str(error))
    layout = RunLayout(tmp_path / "runs" / "c")
    with started_cli("train", "code", "--name", "c", *SMALL, cwd=tmp_path) as process:
        while not [*layout.checkpoints.glob("*2")]:
            assert process.poll() is None, process.communicate()[0]
            sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    done(tmp_path, "train", "--resume", "c")
    check_accounting(layout)
    replay = replay_step(layout, step=4, from_checkpoint=0)
    assert [compared.equal for compared in (*replay.before, replay.compared)] == [True] * 4
    details = areal_flow.open_run(layout.root).trajectories().reward_detail.map(json.loads)
    verdicts = {detail["verdict"] for detail in details}
    assert verdicts <= {"correct", "incorrect", "parse_error", "runtime_error"}
