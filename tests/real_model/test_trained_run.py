"""A short run of real weights by the public entry point: killed, resumed, replayed, audited."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from time import sleep

import pytest

import areal_flow
from areal_flow.core.layout import RunLayout
from areal_flow.flow.recovery.replay import replay_step
from areal_flow.policy.checkpoints import list_checkpoints
from pipelines.cli.main import main
from tests.integration.runs import ENVIRONMENT, check_accounting
from tests.real_model.rows import SAMPLE

pytestmark = pytest.mark.timeout(3600)

NUM_STEPS = 4
SCRIPT = f"""
import areal_flow

def variety(*, prompt, completion, answer):
    words = completion.split()
    return len(set(words)) / (1 + len(words)) + 0.01 * len(words)

areal_flow.train(
    name="real", model=MODEL, prompts=ROWS, rewards=[variety], num_steps={NUM_STEPS},
    num_held_out=4, chat_template=True, max_new_tokens=16, max_model_len=256,
    batch_size=8, group_size=4,
    trainer={{"learning_rate": 1e-6, "checkpoint_every_steps": 2, "tokens_per_micro_batch": 512}},
)
"""


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> areal_flow.Run:
    """A run whose driver was killed after a step that has no checkpoint, and then resumed."""
    folder = tmp_path_factory.mktemp("real")
    short = [row for row in SAMPLE if len(row["question"]) < 300][:40]
    given = f"MODEL, ROWS = {str(model)!r}, {short!r}\n"
    (folder / "script.py").write_text(given + SCRIPT)
    layout = RunLayout(folder / "runs" / "real")
    with (folder / "log").open("w") as log:
        command = [sys.executable, "script.py"]
        driver = subprocess.Popen(
            command, cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while not (layout.steps.is_dir() and len(areal_flow.open_run(layout.root).steps()) > 3):
                assert driver.poll() is None, (folder / "log").read_text()
                sleep(0.2)
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
    assert list_checkpoints(layout.checkpoints)[-1] < NUM_STEPS
    return areal_flow.train(resume="real", runs=folder / "runs")


def test_resumed_run_has_every_step_once_and_tokens_add_up(run: areal_flow.Run) -> None:
    steps = run.steps()
    assert steps.step.tolist() == [*range(NUM_STEPS + 1)]
    assert steps.writer_epoch.iloc[-1] > steps.writer_epoch.iloc[1], "by two drivers"
    assert steps.weights_hash.nunique() == NUM_STEPS + 1
    assert (steps["engine_gap/logprob_difference_mean"].dropna() < 1e-4).all()
    check_accounting(run.layout)
    assert main(["--runs", str(run.layout.root.parent), "check", "real"]) == 0


def test_steps_are_replayed_bit_for_bit(
    run: areal_flow.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last step after the resume, and the earlier ones from the first policy."""
    assert main(["--runs", str(run.layout.root.parent), "replay", "real", "--step", "4"]) == 0
    assert "equal to its record, bit for bit" in capsys.readouterr().out
    replayed = replay_step(run.layout, step=3, from_checkpoint=0)
    assert all(compared.equal for compared in (*replayed.before, replayed.compared))


def test_lineage_leads_from_the_last_weights_to_the_rows(
    run: areal_flow.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    used = run.lineage(NUM_STEPS).trajectories()
    assert used.groupby("step").size().to_dict() == dict.fromkeys(range(1, NUM_STEPS + 1), 8)
    texts = run.trajectories(text=True).set_index("trajectory_id").prompt[used.trajectory_id]
    assert all(any(row["question"] in text for row in SAMPLE) for text in texts)
    assert main(["--runs", str(run.layout.root.parent), "lineage", "real"]) == 0
    output = capsys.readouterr().out
    assert "unbroken" in output
    assert "the checkpoint has the weights hash of the ledger" in output
