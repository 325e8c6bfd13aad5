"""The tasks of an episode, run one by one in this process: engine, rewards, rows."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pyarrow as pa
import pytest

from areal_flow.cluster import generator_tasks, reward_tasks, scoring
from areal_flow.cluster.generator_tasks import GeneratorRole
from areal_flow.cluster.scoring import KillsWorkers
from areal_flow.cluster.worker import WorkerContext
from areal_flow.config import dump_recipe
from areal_flow.core.errors import EpisodeError, InfrastructureError, RewardError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.core.settings import code_hash
from areal_flow.core.types import (
    Completion,
    EngineStats,
    Episode,
    Prompt,
    Score,
    VersionSpan,
    as_tokens,
)
from areal_flow.log.codec import receipts, rollout_rows
from areal_flow.log.dataset import read_rows
from areal_flow.log.ledger_row import group_seeds
from areal_flow.log.run_log import RunLog, create_logs
from areal_flow.log.trajectories import validate_groups
from areal_flow.policy.tokenizer.chat import ToolCall
from areal_flow.policy.tokenizer.directory import copy_model_description, tokenizer_of
from areal_flow.policy.weights.directory import publish_model_directory
from areal_flow.rewards.registry import WeightedRewards
from areal_flow.rollout.prompts.prepare import prepare_prompts
from areal_flow.rollout.prompts.table import PromptTable
from areal_flow.rollout.workflows.episode import RolledOutGroup, TrajectoryDraft
from pipelines.jobs.preflight import found_verifier
from tests.chat_templates import CHATML, HERMES, give_chat_template
from tests.integration.runs import small_recipe
from tests.plain import plain
from tests.policies import write_model_directory
from tests.rows import commit

LENGTHS = "tests.integration.verifiers:reward_length_and_say_so"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def layout(tmp_path: Path, model: Path) -> RunLayout:
    made = RunLayout(tmp_path)
    copy_model_description(model, made.model)
    publish_model_directory(model, made.weights_of(1))
    return made


@pytest.fixture
def worker(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerContext]:
    """One worker that is a generator and a reward worker at once."""
    monkeypatch.setattr(os, "setpgrp", lambda: None)
    context = WorkerContext(layout.root, 1)
    context.setup(
        SimpleNamespace(name="both-0", ip="", metrics={}, state=SimpleNamespace(total_resources={}))
    )

    async def here(function: Callable[..., Any], *arguments: Any) -> Any:
        result = function(*arguments)
        return await result if inspect.isawaitable(result) else result

    for module in (generator_tasks, reward_tasks, scoring):
        monkeypatch.setattr(module, "worker_context", lambda: context)
    monkeypatch.setattr(generator_tasks, "on_reward_worker", here)
    yield context
    if (rewards := context.get(WeightedRewards)) is not None:
        rewards.close()


def settings(layout: RunLayout, workflow: dict[str, Any], **prompts: Any) -> None:
    recipe = small_recipe(
        workflow=workflow,
        prompts=prompts,
        generation={"max_new_tokens": 12, "max_model_len": 64, "max_num_seqs": 16},
        rewards=[{"verifier": LENGTHS}, {"verifier": "numeric", "weight": 0.5}],
    )
    layout.config.write_text(dump_recipe(recipe))


def group_of(layout: RunLayout, index: int, *, group_size: int = 4) -> Episode:
    text = f"{index} + 4 ="
    tokens = as_tokens(tokenizer_of(layout.model).encode(text, add_special_tokens=False).ids)
    prompt = Prompt(f"p{index}", text, str(index + 4), 1, tokens)
    return Episode(index, prompt, group_seeds(0, index, group_size), 0, 1, datetime.now(UTC))


@pytest.mark.parametrize(
    "workflow",
    [
        {"name": "single_turn"},
        {"name": "multi_turn", "max_turns": 3, "num_branches": 2},
        {
            "name": "imported",
            "path": "tests.integration.workflows:CountsWords",
            "settings": {"least": 0},
        },
    ],
    ids=lambda workflow: workflow["name"],
)
def test_groups_are_rolled_out_scored_and_valid(
    layout: RunLayout, worker: WorkerContext, workflow: dict[str, Any]
) -> None:
    settings(layout, workflow)
    groups = tuple(group_of(layout, index) for index in range(6))

    async def graph() -> Any:
        rolled_out = await generator_tasks.rollout(groups, 0)
        return await reward_tasks.score(rolled_out, is_last_try=True)

    scored = asyncio.run(graph())
    validate_groups(scored)
    rows = scored.to_pylist()
    assert {(row["submission_index"], row["member"]) for row in rows} == {
        (index, member) for index in range(6) for member in range(4)
    }
    for row in rows:
        length, numeric = (part["reward"] for part in row["reward_parts"])
        assert row["reward"] in {(length + 0.5 * numeric) * 0.9**turn for turn in range(3)}
        assert row["verifier"].startswith(f"{LENGTHS}@")
    has_environment = any(not all(row["loss_mask"]) for row in rows)
    assert has_environment == (workflow["name"] != "single_turn")
    assert {row["branch"] for row in rows} == set(range(workflow.get("num_branches", 1)))
    assert len(receipts(scored)) == len(rows) >= 24


@pytest.mark.parametrize(("threshold", "verdict"), [(0.5, "correct"), (0.9, "incorrect")])
def test_reward_of_a_workflow_has_the_verdict_of_the_recipes_threshold(
    layout: RunLayout,
    worker: WorkerContext,
    monkeypatch: pytest.MonkeyPatch,
    threshold: float,
    verdict: str,
) -> None:
    layout.config.write_text(dump_recipe(small_recipe(pass_threshold=threshold)))
    group = (group_of(layout, 0, group_size=1),)
    draft = TrajectoryDraft(group[0].prompt.tokens).with_completion(
        Completion(as_tokens([1]), np.zeros(1, np.float32), (VersionSpan(0, 1),), "stop")
    )
    rolled_out = rollout_rows(
        [(group[0], RolledOutGroup(((0, draft.scored(Score(0.7))),)))],
        generator="g",
        started_at=datetime.now(UTC),
        engine_stats=EngineStats(),
    )
    scored = asyncio.run(reward_tasks.score(rolled_out, is_last_try=True))
    (row,) = scored.to_pylist()
    assert (row["reward"], json.loads(row["reward_detail"])["verdict"]) == (0.7, verdict)


def test_next_turn_of_a_chat_is_appended_and_nothing_before_it_is_tokenised_again(
    layout: RunLayout, worker: WorkerContext
) -> None:
    give_chat_template(layout.model, CHATML)
    settings(layout, {"name": "multi_turn", "max_turns": 2}, chat_template=True)
    groups = [group_of(layout, index) for index in range(12)]
    rows = asyncio.run(generator_tasks.rollout(groups, 0))[0].to_pylist()
    tokenizer = tokenizer_of(layout.model)
    with_context = [row for row in rows if not all(row["loss_mask"])]
    assert with_context
    following = "\n<|im_start|>user\nlonger<|im_end|>\n<|im_start|>assistant\n"
    turn = tokenizer.encode(following, add_special_tokens=False).ids
    for row in with_context:
        assert row["prompt_tokens"] == plain(groups[row["submission_index"]].prompt.tokens)
        begins = row["loss_mask"].index(False)
        assert row["output_tokens"][begins - 1] == tokenizer.token_to_id("<|im_end|>")
        assert row["output_tokens"][begins : begins + len(turn)] == turn
        assert row["loss_mask"].count(False) == len(turn)


def test_conversation_of_a_prompt_renders_its_tokens(
    layout: RunLayout, worker: WorkerContext
) -> None:
    give_chat_template(layout.model, CHATML)
    (layout.root / "rows.jsonl").write_text('{"question": "1 + 1 =", "answer": "2"}\n')
    recipe = small_recipe(
        prompts={
            **{"source": "file", "path": str(layout.root / "rows.jsonl"), "num_held_out": 0},
            **{"chat_template": True, "system_prompt": "Add.", "template": "Q: {question}"},
        },
        generation={"max_new_tokens": 12, "max_model_len": 128},
    )
    layout.config.write_text(dump_recipe(recipe))
    prepare_prompts(recipe.prompt_plan(), layout)
    prompt = PromptTable(layout.train_prompts, seed=0).row(0)
    policy = GeneratorRole(worker)
    assert plain(policy.chat(policy.conversation(prompt))) == plain(prompt.tokens)


def test_call_is_none_within_reasoning_that_the_prompt_began(
    layout: RunLayout, worker: WorkerContext
) -> None:
    thinks = HERMES.replace("assistant\n", "assistant\n<think>\n").replace(
        "{% else %}", "{% else %}{{ '<think>\n' if message.role == 'assistant' else '' }}"
    )
    give_chat_template(layout.model, thinks)
    settings(layout, {"name": "tool_use"}, chat_template=True)
    policy, tokenizer = GeneratorRole(worker), tokenizer_of(layout.model)
    call = '<tool_call>\n{"name": "calculator", "arguments": {"input": "6*7"}}\n</tool_call>'
    begun = policy.chat([{"role": "user", "content": "6 * 7 ="}])

    def calls(prompt: Any, answer: str) -> Any:
        ids = tokenizer.encode(answer, add_special_tokens=False).ids
        return policy.chat_calls(prompt, as_tokens(ids))

    assert calls(begun, f"Perhaps {call} later") == []
    assert calls(begun, f"Perhaps.</think>{call}") == [ToolCall("calculator", {"input": "6*7"})]
    assert calls(begun[:-20], f"I ask. {call}") == [ToolCall("calculator", {"input": "6*7"})]


def test_verifier_gets_every_column_of_a_chats_row_as_it_was(
    layout: RunLayout, worker: WorkerContext
) -> None:
    give_chat_template(layout.model, CHATML)
    messages = [{"role": "user", "content": "1 + 1 ="}]
    row = {"id": 7, "messages": messages, "answer": [2, 3], "level": 0.5, "tests": {"f": 1}}
    (layout.root / "rows.jsonl").write_text(json.dumps(row) + "\n")
    recipe = small_recipe(
        prompts={
            **{"source": "file", "path": str(layout.root / "rows.jsonl"), "num_held_out": 0},
            **{"chat_template": True, "question_field": "messages"},
        },
        generation={"max_new_tokens": 12, "max_model_len": 128},
        rewards=[
            {"verifier": "tests.integration.verifiers:show_columns"},
            {"verifier": f"{__name__}:logs_prompts"},
        ],
    )
    layout.config.write_text(dump_recipe(recipe))
    prepare_prompts(recipe.prompt_plan(), layout)
    prompt = PromptTable(layout.train_prompts, seed=0).row(0)
    episode = Episode(0, prompt, (1,), 0, 1, datetime.now(UTC))

    async def graph() -> Any:
        table, notes = await generator_tasks.rollout([episode], 0)
        (spans,) = table["version_spans"].to_pylist()
        place = table.schema.get_field_index("version_spans")
        field = table.schema[place]
        newer = pa.array([[{**span, "version": 3} for span in spans]], field.type)
        rolled_out = table.set_column(place, field, newer), notes
        return await reward_tasks.score(rolled_out, is_last_try=True)

    (detail,) = asyncio.run(graph())["reward_detail"].to_pylist()
    assert json.loads(json.loads(detail)["extracted"]) == row
    epoch = 3 * recipe.controller.batch_size / recipe.controller.group_size  # of one prompt
    assert json.loads(detail)["extra"] == {"asked": messages, "step": [3, recipe.num_steps, epoch]}


def logs_prompts(prompts: Any, completions: Any, trainer_state: Any, log_extra: Any) -> Any:
    assert [[message["role"] for message in completion] for completion in completions] == [
        ["assistant"]
    ]
    log_extra("asked", prompts)
    state = trainer_state
    log_extra("step", [[state.global_step, state.max_steps, state.epoch]])
    return [0.0]


def test_group_whose_members_all_fail_is_tried_again_and_stored_by_its_last_attempt(
    layout: RunLayout, worker: WorkerContext
) -> None:
    path = "tests.integration.workflows:CountsWords"
    settings(layout, {"name": "imported", "path": path, "settings": {"least": 999}})
    create_logs(layout)
    last = group_of(layout, 0)

    async def graph() -> Any:
        with pytest.raises(EpisodeError, match="ValueError: expected 999 characters"):
            await generator_tasks.rollout((replace(last, is_last_attempt=False),), 0)
        rolled_out = await generator_tasks.rollout((last,), 0)
        return await reward_tasks.score_and_write([rolled_out], is_last_try=True)

    ((receipt,), *_) = asyncio.run(graph())
    assert [t.reward for t in receipt.trajectories] == [None] * 4
    assert [t.num_tokens for t in receipt.trajectories] == [0] * 4
    assert len(receipt.member_errors) == 4
    commit(RunLog(layout, Writer(Path("nobody"), 1)), receipt)
    failed = read_rows(layout, "trajectories", where="finish_reason = 'error'")
    assert len(failed) == 4
    for row in failed.to_pylist():
        assert row["prompt_id"] == "p0"
        assert row["prompt_tokens"] == plain(last.prompt.tokens)
        assert row["output_tokens"] == row["loss_mask"] == row["version_spans"] == []
        detail = json.loads(row["reward_detail"])
        assert detail["verdict"] == "error"
        assert "ValueError: expected 999 characters" in detail["error"]


async def one_for_any_answer(base_url: str, api_key: str) -> float:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: Any = [{"role": "user", "content": "?"}]
        # A stop string of the call's own, where the recipe has none.
        await client.chat.completions.create(model="m", messages=messages, stop="####")
    return 1.0


def test_rows_of_an_agent_name_its_code_and_another_code_is_refused(
    layout: RunLayout, worker: WorkerContext
) -> None:
    give_chat_template(layout.model, CHATML)
    path = f"{__name__}:one_for_any_answer"
    recipe = small_recipe(
        workflow={"name": "agent", "path": path},
        prompts={"chat_template": True},
        generation={"max_new_tokens": 12, "max_model_len": 64, "max_num_seqs": 16},
        rewards=[],
    )
    layout.config.write_text(dump_recipe(recipe))
    create_logs(layout)
    group = group_of(layout, 0)

    async def graph() -> Any:
        rolled_out = await generator_tasks.rollout((group,), 0)
        return await reward_tasks.score(rolled_out, is_last_try=True)

    rows = asyncio.run(graph()).to_pylist()
    assert [row["reward"] for row in rows] == [1.0] * 4
    identity = found_verifier(layout, recipe).identity
    assert {row["verifier"] for row in rows} == {identity}
    assert identity == f"agent:{path}@{code_hash(one_for_any_answer)}"
    worker.drop(GeneratorRole)
    layout.inputs.write_text(
        json.dumps({"verifiers": [[1, "agent:else@0"]], "files": {}, "model": {}, "sources": {}})
    )
    with pytest.raises(RewardError, match="resume it with --accept-verifier"):
        asyncio.run(graph())


def without_service(*, completion: str) -> Score:
    return Score(None, "infrastructure_error", error="the judge is down")


def test_rows_without_a_verdict_are_kept_by_the_last_try_only(
    layout: RunLayout, worker: WorkerContext
) -> None:
    verifier = f"{__name__}:without_service"
    recipe = small_recipe(rewards=[{"verifier": verifier}], generation={"max_new_tokens": 12})
    layout.config.write_text(dump_recipe(recipe))
    group = group_of(layout, 0)
    rolled_out = asyncio.run(generator_tasks.rollout((group,), 0))
    with pytest.raises(InfrastructureError, match="the judge is down"):
        asyncio.run(reward_tasks.score(rolled_out, is_last_try=False))
    scored = asyncio.run(reward_tasks.score(rolled_out, is_last_try=True))
    assert scored["reward"].to_pylist() == [None] * 4
    assert {json.loads(d)["verdict"] for d in scored["reward_detail"].to_pylist()} == {
        "infrastructure_error"
    }


running: list[int] = [0, 0]
"""Verdicts that are being made, and the most that were at the same time."""


async def judge_that_waits(*, completion: str) -> float:
    running[0] += 1
    running[1] = max(running)
    await asyncio.sleep(0.05)
    running[0] -= 1
    return 1.0


def verifier_that_computes(*, completion: str) -> float:
    running[0] += 1
    running[1] = max(running)
    time.sleep(0.002)
    running[0] -= 1
    return 1.0


@pytest.mark.parametrize(
    ("verifier", "max_running", "num_groups"),
    [("judge_that_waits", 16, 4), ("verifier_that_computes", 1, 1)],
)
def test_several_groups_are_judged_at_once_where_the_verifier_waits(
    layout: RunLayout, worker: WorkerContext, verifier: str, max_running: int, num_groups: int
) -> None:
    running[:] = [0, 0]
    create_logs(layout)
    recipe = small_recipe(rewards=[{"verifier": f"{__name__}:{verifier}"}])
    layout.config.write_text(dump_recipe(recipe))
    groups = [group_of(layout, index) for index in range(8)]

    async def graph() -> Any:
        rollouts = [await generator_tasks.rollout((group,), 0) for group in groups]
        return await reward_tasks.score_and_write(rollouts, is_last_try=True)

    receipts, _, max_concurrency = asyncio.run(graph())
    assert [len(receipt.trajectories) for receipt in receipts] == [4] * 8
    assert (running[1], max_concurrency) == (max_running, num_groups)


def test_completion_of_an_episode_over_which_reward_workers_die_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run_reward_task(*arguments: Any, **_: Any) -> Any:
        items = arguments[-1]
        if "poisoned" in items:
            raise KillsWorkers("each worker died")
        return [f"{item}!" for item in items]

    monkeypatch.setattr(scoring, "run_reward_task", run_reward_task)
    context = SimpleNamespace(executions=None, recipe=small_recipe())
    monkeypatch.setattr(scoring, "worker_context", lambda: context)
    monkeypatch.setattr(scoring, "get_client", lambda: None)
    for function, failed in reward_tasks.RESULT_ON_CRASH.items():
        results = scoring.on_reward_worker(function, "of", ["a", "poisoned", "b"])
        assert asyncio.run(results) == ["a!", failed, "b!"]
