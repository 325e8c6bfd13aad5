"""From import to a trained policy: in a bare script, and on a running event loop."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import openai
import pandas as pd
import psutil
import pytest

import areal_flow
from areal_flow.core.errors import ArealFlowError, RewardError
from areal_flow.core.layout import RunLayout
from areal_flow.flow.recovery.replay import replay_step
from areal_flow.log.directory import observed_state
from areal_flow.log.ledger import LedgerReader
from tests.chat_templates import CHATML, give_chat_template
from tests.integration.runs import (
    LIMIT_S,
    SMALL,
    check_accounting,
    done,
    run_script,
    started_script,
)
from tests.policies import write_model_directory

SETTINGS: dict[str, Any] = {
    **{key: SMALL[key] for key in ("generation", "controller", "trainer", "tracking")},
    "num_steps": 2,
}
ROWS = [{"question": f"{n} + 1 =", "answer": str(n + 1), "difficulty": n % 3} for n in range(40)]

SCRIPT = f"""
import areal_flow
def brevity(*, prompt, completion, answer): return 1.0 / (1 + len(completion)) + BONUS
BONUS = 0.25
rows = [{{"question": f"{{n}} + 1 =", "answer": str(n + 1)}} for n in range(40)]
run = areal_flow.train(prompts=rows, rewards=[brevity], name="five", **{SETTINGS!r})
print(len(run.steps()) - 1, run.trajectories().reward.min() > 0.25)
"""


@pytest.mark.slow
def test_five_lines_from_import_to_a_trained_policy(tmp_path: Path) -> None:
    assert run_script(SCRIPT, cwd=tmp_path).strip().splitlines()[-1] == "2 True"
    layout = RunLayout((tmp_path / "runs" / "five").resolve())
    check_accounting(layout)
    (source,) = layout.rewards.glob("brevity*.py")
    assert "def brevity" in source.read_text()


@pytest.mark.slow
async def test_fine_tuned_trained_and_evaluated_in_a_running_event_loop(tmp_path: Path) -> None:
    """As in a notebook cell; the tables are pandas."""
    assert asyncio.get_running_loop().is_running()
    completions = pd.DataFrame(
        [{"prompt": row["question"], "completion": f" #### {row['answer']}"} for row in ROWS]
    )
    runs = tmp_path / "runs"
    policy = areal_flow.sft(
        rows=completions,
        runs=runs,
        name="taught",
        sft={"num_steps": 30, "batch_size": 8, "learning_rate": 5e-3},
        **{key: SETTINGS[key] for key in ("generation", "trainer")},
    )
    assert json.loads((policy / "state.json").read_text())["step"] == 30
    assert (policy / "tokenizer.json").is_file()
    run = areal_flow.train(
        prompts=pd.DataFrame(ROWS), model=policy, runs=runs, name="trained", **SETTINGS
    )
    assert len(run.steps()) == 3
    assert set(run.trajectories().difficulty) <= {0, 1, 2}
    check_accounting(run.layout)
    result = areal_flow.evaluate(run, prompts=ROWS, num_prompts=8)
    assert result.table.overall.passed.n == 8
    assert len(result.answers) == 8


def brevity(completion: str) -> float:
    return 1 / (1 + len(completion))


@pytest.mark.slow
def test_background_run_calls_back_after_each_step_stops_and_resumes(tmp_path: Path) -> None:
    steps: list[dict[str, Any]] = []
    few = {**SETTINGS, "num_steps": 200}
    given: dict[str, Any] = {"prompts": ROWS, "rewards": brevity, "runs": tmp_path, "name": "r"}
    handle = areal_flow.train(**given, **few, wait=False, on_step=steps.append)
    while len(steps) < 2:
        time.sleep(0.1)
        assert handle.status.state == "running"
    assert handle.status.num_steps == 200
    assert len(handle.run.steps()) >= 3, "it can be queried while it trains"
    handle.stop()
    run = handle.result(timeout=LIMIT_S)
    assert handle.status.state == "stopped"
    assert [row["step"] for row in steps] == [*range(1, len(run.steps()))]
    recorded = run.steps(where="step = 2").iloc[0]
    for name in ("reward_mean", "num_trained_tokens", "rollout/pass_rate"):
        assert steps[1][name] == recorded[name]

    last = steps[-1]["step"]
    again = areal_flow.train(
        resume="r", runs=tmp_path, on_step=lambda row: row["step"] == last + 1, wait=False
    )
    assert again.result(LIMIT_S).steps().step.max() == last + 1
    assert again.status.state == "finished", "the callback's own stop is an end"
    check_accounting(run.layout)


@pytest.mark.slow
def test_error_of_a_background_run_comes_at_once_or_with_its_result(tmp_path: Path) -> None:
    def fails_later(completion: str) -> float:
        if (tmp_path / "fail").exists():
            raise ValueError("broken since the second step")
        return len(completion)

    rewards: dict[str, Any] = {"verifier": fails_later}
    given: dict[str, Any] = {"prompts": ROWS, "runs": tmp_path, "wait": False, **SETTINGS}
    with pytest.raises(RewardError, match=r"fails on the first prompt row: .*no answer"):
        areal_flow.train(rewards=without_answer, name="early", **given)
    assert not (tmp_path / "early").exists()
    more = {"num_steps": 200, "on_step": lambda _: (tmp_path / "fail").touch()}
    handle = areal_flow.train(rewards=rewards, name="late", **given | more)
    with pytest.raises(ArealFlowError, match="broken since the second step"):
        handle.result(timeout=LIMIT_S)
    assert handle.status.state == "failed"


def without_answer(completion: str) -> float:
    raise ValueError("no answer")


SCRIPT_ENDS = f"""
import time, areal_flow
def brevity(completion): return 1 / (1 + len(completion))
rows = [{{"question": f"{{n}} + 1 =", "answer": str(n + 1)}} for n in range(40)]
settings = {{**{SETTINGS!r}, "num_steps": 200}}
handle = areal_flow.train(prompts=rows, rewards=brevity, name="left", wait=False, **settings)
while handle.status.step < 2: time.sleep(0.1)
"""


@pytest.mark.slow
def test_script_that_ends_before_its_run_leaves_a_run_to_resume(tmp_path: Path) -> None:
    output = run_script(SCRIPT_ENDS, cwd=tmp_path)
    assert "\nend of the process: stopping at once\n" in output
    assert output.strip().endswith("Continue with: areal_flow.train(resume='left')")
    layout = RunLayout((tmp_path / "runs" / "left").resolve())
    assert observed_state(layout).state == "stopped"
    head = LedgerReader(layout).head
    run = areal_flow.train(resume="left", runs=tmp_path / "runs", num_steps=head + 1)
    assert run.steps().step.max() == head + 1
    check_accounting(layout)


SCRIPT_WAITS = SCRIPT_ENDS.rpartition("while")[0] + "handle.result()"


@pytest.mark.slow
def test_killed_process_of_a_background_run_leaves_no_worker_and_a_run_to_resume(
    tmp_path: Path,
) -> None:
    """As when a notebook's kernel is killed."""
    layout = RunLayout((tmp_path / "runs" / "left").resolve())
    with started_script(SCRIPT_WAITS, cwd=tmp_path) as process:
        while not layout.steps.is_dir() or LedgerReader(layout).head < 2:
            assert process.poll() is None
            time.sleep(0.1)
        left = psutil.Process(process.pid).children(recursive=True)
        assert len(left) >= 3, "a trainer, a generator and a reward worker"
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(left, timeout=60)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
    assert observed_state(layout).state == "crashed"
    done(tmp_path, "check", "left")
    last = LedgerReader(layout).head + 1
    done(tmp_path, "train", "--resume", "left", "--num-steps", str(last))
    assert observed_state(layout).state == "finished"
    assert LedgerReader(layout).head == last
    done(tmp_path, "check", "left")


@pytest.mark.slow
def test_agent_and_held_out_rows_of_a_notebook_are_trained_resumed_evaluated_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model_directory(tmp_path / "model")
    give_chat_template(model, CHATML)
    bonus = 0.25

    async def asks(question: str, base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            completion = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": question}], max_tokens=6
            )
        return len(completion.choices[0].message.content or "") / 50 + bonus

    generation = {**SMALL["generation"], "max_model_len": 256}
    settings: dict[str, Any] = {**SETTINGS, "model": model, "generation": generation}
    settings["trainer"] = {**SMALL["trainer"], "tokens_per_micro_batch": 1024}
    held_out = pd.DataFrame(ROWS[:4])
    given: dict[str, Any] = {"prompts": ROWS[4:], "held_out": held_out, "agent": asks}
    run = areal_flow.train(**given, name="a", runs=tmp_path, **settings)
    evaluated = run.evaluations(columns=["metadata.question"])["metadata.question"]
    assert set(evaluated) == set(held_out.question)
    assert run.trajectories().reward.min() >= bonus
    (verifier,) = set(run.trajectories().verifier)
    assert re.fullmatch(r"agent:asks@\w{12}", verifier)

    capsys.readouterr()
    del asks
    run = areal_flow.train(resume="a", runs=tmp_path, num_steps=3)
    assert "code that came with the run directory: rewards/asks@" in capsys.readouterr().out
    assert set(run.trajectories().verifier) == {verifier}
    check_accounting(run.layout)
    replay = replay_step(run.layout, step=3, from_checkpoint=0)
    assert [compared.equal for compared in (*replay.before, replay.compared)] == [True] * 3
    result = areal_flow.evaluate("a", runs=tmp_path)
    assert result.table.overall.passed.n == 4
    assert {answer["verifier"] for answer in result.answers} == {verifier}
