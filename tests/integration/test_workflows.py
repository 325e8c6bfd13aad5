"""Episodes of several turns, trained end to end, with tools and rewards in between."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import psutil
import pytest

import areal_flow
from areal_flow.core.layout import RunLayout
from areal_flow.core.settings import code_hash
from areal_flow.core.types import submission_index_of
from areal_flow.flow.recovery.replay import replay_step
from areal_flow.log.browse import GroupSelection, select_groups, show_group
from areal_flow.policy.tokenizer.directory import tokenizer_of
from pipelines.planning import lengths_of_run
from tests.chat_templates import CHATML, give_chat_template
from tests.harbor_tasks import write_task
from tests.integration.runs import (
    check_accounting,
    check_costs,
    done,
    run_small,
    small_arguments,
    small_recipe,
    started_cli,
    step_reached,
    worker_pid,
)
from tests.integration.workflows import asks_twice
from tests.openenv_server import COMMAND
from tests.policies import write_model_directory

VERIFIERS = "tests.integration.verifiers"
FAILS_FOR_SOME = "tests.integration.workflows:FailsForSome"


async def kill_in_turn(layout: RunLayout, roles: Mapping[int, str]) -> None:
    """Kill a worker of each role once its step is reached."""
    for step, role in roles.items():
        await step_reached(layout, step)
        os.kill(await worker_pid(role), signal.SIGKILL)
        await asyncio.sleep(0.5)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """A run of branching conversations whose workers were killed during some of them."""
    root = tmp_path_factory.mktemp("runs") / "conversations"
    layout = RunLayout(root.resolve())

    recipe = small_recipe(
        num_steps=6,
        prompts={"num_held_out": 16},
        generation={"max_new_tokens": 12, "max_model_len": 64, "max_num_seqs": 16},
        workflow={"name": "multi_turn", "max_turns": 3, "num_branches": 2, "turn_discount": 0.5},
        rewards=[
            {"verifier": f"{VERIFIERS}:reward_length_and_say_so"},
            {"verifier": "numeric", "weight": 0.5},
        ],
    )
    return run_small(root, recipe, partial(kill_in_turn, layout, {1: "generator", 3: "reward"}))


@pytest.mark.slow
def test_conversations_are_trained_and_tokens_add_up(conversations: RunLayout) -> None:
    check_accounting(conversations)
    steps = areal_flow.open_run(conversations.root).steps("arrow")
    assert sorted(steps["step"].to_pylist()) == list(range(7))
    assert all(n > 0 for n in steps.sort_by("step")["num_trained_tokens"].to_pylist()[1:])


@pytest.mark.slow
def test_log_has_turns_branches_and_the_parts_of_rewards(conversations: RunLayout) -> None:
    rows = areal_flow.open_run(conversations.root).trajectories("arrow").to_pylist()
    assert {row["branch"] for row in rows} == {0, 1}
    with_context = [row for row in rows if not all(row["loss_mask"])]
    assert with_context
    for row in rows:
        length, numeric = row["reward_parts"]
        assert length["name"].endswith("reward_length_and_say_so")
        assert numeric["name"] == "numeric"
        total = length["reward"] + 0.5 * numeric["reward"]
        assert row["reward"] in {total, total * 0.5, total * 0.25}
        assert " + 0.5*numeric@" in row["verifier"]
    members = {(row["submission_index"], row["member"]) for row in rows}
    indices = {submission_index_of(row["trajectory_id"]) for row in rows}
    assert members == {(index, member) for index in indices for member in range(4)}


@pytest.mark.slow
def test_parts_of_rewards_can_be_queried(conversations: RunLayout) -> None:
    with areal_flow.open_run(conversations.root).database() as database:
        ((mean,),) = database.sql(
            "SELECT avg(list_filter(reward_parts, lambda part: part.name = 'numeric')[1].reward) "
            "FROM trajectories"
        ).fetchall()
    assert 0 <= mean <= 1


@pytest.mark.slow
def test_conversations_are_replayed_bit_for_bit(conversations: RunLayout) -> None:
    replay = replay_step(conversations, step=6, from_checkpoint=0)
    assert [compared.equal for compared in (*replay.before, replay.compared)] == [True] * 6


@pytest.mark.slow
def test_conversations_are_evaluated_as_they_are_trained(conversations: RunLayout) -> None:
    answers = areal_flow.open_run(conversations.root).evaluations()
    assert set(answers.evaluation) == {"before", "after"}
    assert len(answers) == 32
    assert set(answers.writer_epoch) == {1}
    assert answers.completion.str.contains("longer").any()


@pytest.mark.walk
def test_tool_is_called_on_a_worker_and_costs_only_the_member_that_it_fails(
    tmp_path: Path,
) -> None:
    recipe = small_recipe(
        num_steps=2,
        prompts={"num_held_out": 8},
        generation={"max_new_tokens": 12, "max_model_len": 64, "max_num_seqs": 16},
        workflow={
            "name": "imported",
            "path": "tests.integration.workflows:CountsWords",
            "settings": {"least": 12},
        },
    )
    layout = run_small(tmp_path / "tools", recipe)
    check_accounting(layout)
    run = areal_flow.open_run(layout.root)
    rows = run.trajectories("arrow").to_pylist()
    has_failed = [row["finish_reason"] == "error" for row in rows]
    sizes = [sum(has_failed[n : n + 4]) for n in range(0, len(rows), 4)]
    assert any(0 < size < 4 for size in sizes)
    assert all(row["loss_mask"].count(False) >= 1 for row in rows if row["output_tokens"])
    assert sum(run.steps("arrow")["num_failed_members"].to_pylist()) > 0
    answers = run.evaluations()
    failed = answers[answers.finish_reason == "error"]
    assert len(answers) == 16
    assert failed.reward.isna().all()
    assert failed.reward_detail.str.contains("ValueError: expected 12 characters").all()


@pytest.mark.slow
def test_episodes_in_sandboxes_whose_workers_are_killed_are_trained_audited_and_replayed(
    tmp_path: Path,
) -> None:
    layout = RunLayout((tmp_path / "sandboxes").resolve())

    recipe = small_recipe(
        num_steps=5,
        prompts={"num_held_out": 8},
        generation={"max_new_tokens": 6, "max_model_len": 64, "max_num_seqs": 16},
        workflow={
            "name": "imported",
            "path": "tests.integration.workflows:CountsInItsSandbox",
        },
    )
    run_small(
        layout.root,
        recipe,
        partial(kill_in_turn, layout, {1: "reward", 2: "generator", 3: "reward"}),
    )
    check_accounting(layout)
    replay = replay_step(layout, step=4, from_checkpoint=0)
    assert all(compared.equal for compared in (*replay.before, replay.compared))
    rows = areal_flow.open_run(layout.root).trajectories("arrow").to_pylist()
    decode = tokenizer_of(layout.model).decode
    for row in rows:
        shown = [
            t for t, own in zip(row["output_tokens"], row["loss_mask"], strict=True) if not own
        ]
        if row["finish_reason"] == "error":
            assert row["reward"] is None
        else:
            first, second = map(int, decode(shown).split())
            assert 0 <= first <= second
    commands = [process.cmdline() for process in psutil.Process().children(recursive=True)]
    assert not [command for command in commands if "inside.zygote" in " ".join(command)]


@pytest.mark.slow
def test_tasks_reward_by_their_tests_though_reward_workers_are_killed(tmp_path: Path) -> None:
    test = "#!/bin/bash\necho 0.$((RANDOM % 10)) > /logs/verifier/reward.txt\n"
    for number in range(20):
        folder = write_task(tmp_path / "tasks" / f"t{number}", expected=number + 30, test=test)
        (folder / "instruction.md").write_text(f"Add {number} and 30 =\n")
    recipe = small_recipe(
        num_steps=4,
        sft={"num_steps": 0},
        prompts={"source": f"harbor:{tmp_path / 'tasks'}", "num_held_out": 4},
        generation={
            "max_new_tokens": 6,
            "max_model_len": 128,
            "max_num_seqs": 16,
            "stop": {"strings": ["</tool>"]},
        },
        workflow={"name": "sandbox"},
        rewards=[],
    )
    layout = RunLayout((tmp_path / "tested").resolve())
    run_small(layout.root, recipe, partial(kill_in_turn, layout, {1: "reward", 2: "reward"}))
    shutil.rmtree(tmp_path / "tasks")  # the run has its own
    check_accounting(layout)
    replay = replay_step(layout, step=4, from_checkpoint=0)
    assert all(compared.equal for compared in (*replay.before, replay.compared))
    rows = areal_flow.open_run(layout.root).trajectories("arrow").to_pylist()
    rewards = {row["reward"] for row in rows if row["finish_reason"] != "error"}
    assert len(rewards) > 3
    assert rewards <= {round(number / 10, 1) for number in range(10)}
    assert {row["verifier"] for row in rows} == {"tests"}
    assert len([*(layout.rewards / "tasks").iterdir()]) == 20


@pytest.mark.slow
def test_agent_of_an_sdk_whose_generator_is_killed_is_trained_audited_and_replayed(
    tmp_path: Path,
) -> None:
    model = write_model_directory(tmp_path / "model")
    give_chat_template(model, CHATML)
    recipe = small_recipe(
        model=str(model),
        num_steps=4,
        sft={"num_steps": 0},
        prompts={"num_held_out": 4, "chat_template": True},
        generation={"max_new_tokens": 12, "max_model_len": 256, "max_num_seqs": 16},
        trainer={"tokens_per_micro_batch": 1024},
        workflow={"name": "agent", "path": "tests.integration.workflows:asks_twice"},
        rewards=[],
    )
    layout = RunLayout((tmp_path / "agent").resolve())

    async def kill_in_the_midst_of_calls() -> None:
        await step_reached(layout, 1)
        os.kill(await worker_pid("generator"), signal.SIGKILL)

    run_small(layout.root, recipe, kill_in_the_midst_of_calls)
    check_accounting(layout)
    rows = areal_flow.open_run(layout.root).trajectories("arrow").to_pylist()
    assert {row["branch"] for row in rows} == {0}
    scored_by = f"agent:tests.integration.workflows:asks_twice@{code_hash(asks_twice)}"
    assert {row["verifier"] for row in rows} == {scored_by}
    members = {(row["submission_index"], row["member"]) for row in rows}
    assert len(members) == len(rows), "what was rolled out again is stored once"
    assert len(rows) == 4 * len({index for index, _ in members}), "nothing else was lost"
    assert all(row["loss_mask"].count(True) <= 12 for row in rows)
    text = tokenizer_of(layout.model).decode(rows[0]["output_tokens"], skip_special_tokens=False)
    assert "<|im_start|>user\nBetter?<|im_end|>\n<|im_start|>assistant\n" in text
    replay = replay_step(layout, step=4, from_checkpoint=0)
    assert [compared.equal for compared in (*replay.before, replay.compared)] == [True] * 4


@pytest.mark.slow
def test_environment_whose_generator_is_killed_is_trained_audited_and_replayed(
    tmp_path: Path,
) -> None:
    model = write_model_directory(tmp_path / "model")
    give_chat_template(model, CHATML)
    server = f"{COMMAND} {tmp_path}"  # an argument to find its processes by
    recipe = small_recipe(
        model=str(model),
        num_steps=4,
        sft={"num_steps": 0},
        prompts={"num_held_out": 4, "chat_template": True},
        generation={
            **{"max_new_tokens": 12, "max_model_len": 256, "max_num_seqs": 16},
            "stop": {"token_ids": [*range(5, 60)]},
        },
        trainer={"tokens_per_micro_batch": 1024},
        workflow={
            **{"name": "openenv", "server": server, "max_actions": 3, "action_field": "message"},
            "reset_fields": ["question"],
        },
        rewards=[],
    )
    layout = RunLayout((tmp_path / "environment").resolve())

    async def kill_in_the_midst_of_steps() -> None:
        await step_reached(layout, 1)
        os.kill(await worker_pid("generator"), signal.SIGKILL)

    run_small(layout.root, recipe, kill_in_the_midst_of_steps)
    check_accounting(layout)
    rows = areal_flow.open_run(layout.root).trajectories("arrow").to_pylist()
    assert {row["verifier"] for row in rows} == {f"openenv:{server}"}
    assert sum(len(row["tool_calls"]) for row in rows) > len(rows)
    for row in rows:
        extra = json.loads(row["reward_detail"])["extra"]
        assert row["reward"] == sum(extra["step_rewards"])
        assert json.loads(extra["state"]) == {"step_count": len(row["tool_calls"])}
    replay = replay_step(layout, step=4, from_checkpoint=0)
    assert [compared.equal for compared in (*replay.before, replay.compared)] == [True] * 4
    running = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info)]
    assert not psutil.wait_procs(running, timeout=5)[1]


@pytest.mark.slow
def test_rows_of_failed_workflows_are_logged_also_after_a_kill_and_a_resume(
    tmp_path: Path,
) -> None:
    layout = RunLayout((tmp_path / "runs" / "k").resolve())
    workflow = ("--workflow.name", "imported", "--workflow.path", FAILS_FOR_SOME)
    changes = (*workflow, "--num-steps", "500", "--prompts.num-held-out", "24")
    with started_cli("train", "--name", "k", *small_arguments(), *changes, cwd=tmp_path) as process:
        while not layout.steps.exists() or len(failed_rows(layout)) < 8:
            assert process.poll() is None, process.communicate()[0]
            sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    before = failed_rows(layout)
    head = len(areal_flow.open_run(layout.root).steps()) - 1
    run = areal_flow.train(resume=layout.root, num_steps=head + 4)
    check_accounting(layout)
    check_costs(layout)

    failed = failed_rows(layout)
    assert [row for row in before if row not in failed] == []
    assert len(failed) > len(before)
    counted = Counter((row["submission_index"], row["member"]) for row in failed)
    assert set(counted.values()) == {1}, "also where a group was tried three times"
    sizes = Counter(index for index, _ in counted)
    for row in failed:
        fails = str(eval(row["prompt"].rstrip("= "))).endswith("7")
        assert not fails or (sizes[row["submission_index"]], row["attempt"]) == (4, 2)
        error = f"LookupError: {'no' if fails else 'half a'} page about"
        assert json.loads(row["reward_detail"])["error"].startswith(error)
        assert (row["verdict"], row["num_tokens"], row["passed"]) == ("error", 0, False)
    assert min(sizes.values()) < 4, "of other groups some members failed"
    consumed = (
        run.consumption().set_index("trajectory_id").loc[[r["trajectory_id"] for r in failed]]
    )
    assert set(consumed.status) <= {"discarded", "waiting"}
    assert set(consumed.reason.dropna()) == {"workflow_error"}
    assert not any(run.steps()["failed_submissions"].list.len())

    shown = done(tmp_path, "trajectories", "k", "--where", "finish_reason = 'error'", "--show", "1")
    assert "page about" in shown
    (group, *_), _ = select_groups(run, GroupSelection("verdict = 'error'", order="oldest"))
    assert group["status"] == "workflow_error"
    assert len(show_group(run, group["group"])) == group["members"] == 4
    assert lengths_of_run(layout).completion_tokens.min() > 0
    run.plot.timeline(num_steps=2)
    answers = run.evaluations()
    of_failed = answers[answers.finish_reason == "error"]
    assert set(answers.evaluation) == {"before", "after"}
    assert all(
        answer in detail
        for answer, detail in zip(of_failed.answer, of_failed.reward_detail, strict=True)
    )
    replay = replay_step(layout, step=head + 4, from_checkpoint=0)
    assert all(compared.equal for compared in (*replay.before, replay.compared))


def failed_rows(layout: RunLayout) -> list[dict[str, Any]]:
    run = areal_flow.open_run(layout.root)
    rows = run.trajectories("arrow", where="finish_reason = 'error'", text=True)
    moving = ["status", "step", "reason", "policy_version"]
    return rows.drop_columns(moving).to_pylist()  # type: ignore[no-any-return]


CALCULATOR = (
    *("--num-steps", "4", "--prompts.num-held-out", "8", "--prompts.num-prompts", "400"),
    *("--sft.num-steps", "60", "--controller.batch-size", "32", "--controller.group-size", "4"),
    *("--trainer.checkpoint-every-steps", "2", "--tracking.enabled", "false"),
)


@pytest.mark.slow
def test_shipped_job_with_tools_is_killed_resumed_audited_and_replayed(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "runs" / "tools")
    command = ("train", "calculator", "--name", "tools", *CALCULATOR)
    with started_cli(*command, cwd=tmp_path) as process:
        while not [*layout.checkpoints.glob("*2")]:
            assert process.poll() is None, process.communicate()[0]
            sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    done(tmp_path, "train", "--resume", "tools")
    check_accounting(layout)
    replay = replay_step(layout, step=4, from_checkpoint=0)
    assert [compared.equal for compared in (*replay.before, replay.compared)] == [True] * 4

    rows = areal_flow.open_run(layout.root).trajectories("arrow").to_pylist()
    decode = tokenizer_of(layout.model).decode
    called = [row for row in rows if not all(row["loss_mask"])]
    assert called
    for row in called:
        masked = zip(row["output_tokens"], row["loss_mask"], strict=True)
        shown = decode([token for token, chosen in masked if not chosen])
        assert shown.startswith("<result>")
        assert shown.endswith("</result>")
        assert row["reward_parts"][-1] == {"name": "tool_calls", "reward": 1.0}
        (call,) = row["tool_calls"]
        assert (call["turn"], call["exit_code"]) == (0, None)
        assert shown == f"<result>{call['result']}</result>"
        assert json.loads(call["arguments"]).keys() == {"input"}
        assert 0 < call["duration_s"] < 60
