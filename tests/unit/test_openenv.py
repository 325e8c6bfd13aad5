"""Episodes in OpenEnv environments: turns, actions, rewards, and what a lost server does."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import psutil
import pytest
from aiohttp.test_utils import TestServer

from areal_flow.config import build_recipe
from areal_flow.core.errors import ConfigError
from areal_flow.core.types import Completion, GroupRequest
from areal_flow.rollout.workflows.episode import RolledOutGroup, TrajectoryDraft, run_group
from areal_flow.rollout.workflows.openenv import OpenEnv
from areal_flow.rollout.workflows.openenv_client import running_server
from tests.episodes import PROMPT, TextServices, episode_of
from tests.openenv_server import COMMAND, OPEN, TOOL, application

FIELDS: dict[str, Any] = {"action_field": "message", "observation_field": "board.text"}


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[TestServer]:
    async with TestServer(application(**settings)) as server:
        yield server
        for _ in range(100):
            if not server.app[OPEN]:
                return
            await asyncio.sleep(0.02)
        pytest.fail("an episode left its connection open")


async def roll_out(
    server: TestServer, services: TextServices, size: int = 1, /, **settings: Any
) -> RolledOutGroup:
    workflow = OpenEnv.model_validate({"server": str(server.make_url("")), **FIELDS, **settings})
    prompt = replace(PROMPT, metadata={"seed": 7})
    return await run_group(workflow, replace(episode_of(size), prompt=prompt), services)


async def played(server: TestServer, services: TextServices, **settings: Any) -> TrajectoryDraft:
    group = await roll_out(server, services, **settings)
    assert group.errors == ()
    ((_, draft),) = group.drafts
    assert draft.score is not None
    return draft


def says(*answers: str) -> Any:
    """Return a policy that gives these answers, one after the other."""
    remaining = iter(answers)
    return lambda _: next(remaining)


async def test_observations_are_context_and_steps_are_in_the_log() -> None:
    services = TextServices(says("up", "done"))
    async with served() as server:
        draft = await played(server, services, reset_fields=["seed"])
    question = services.decode(PROMPT.tokens)
    assert services.decode(draft.prompt_tokens) == f"{question}\nseed 7\n"
    assert services.decode(draft.output_tokens) == "up\nyou: up\ndone"
    context = services.decode(draft.output_tokens[~draft.loss_mask])
    assert context == "\nyou: up\n"
    steps = [(call.turn, call.name, call.arguments, call.result) for call in draft.tool_calls]
    assert steps == [
        (0, "step", '{"message": "up"}', "you: up"),
        (1, "step", '{"message": "done"}', "you: done"),
    ]
    assert draft.finish_reason == "stop"
    score = draft.score
    assert score is not None
    assert score.reward == 6
    assert dict(score.parts) == {"sum": 6, "last": 4, "steps": 2, "errors": 0}
    assert score.extra == {"step_rewards": [2.0, 4.0], "state": '{"step_count": 2}'}


async def test_first_observation_is_in_the_users_message_of_a_chat() -> None:
    services = TextServices(says("up", "done"), is_chat=True)
    async with served() as server:
        draft = await played(server, services, reset_fields=["seed"], episode_reward="last")
    shown = f"<user>{PROMPT.text}\nseed 7<assistant>"
    assert services.decode(draft.prompt_tokens) == shown
    assert services.decode(draft.output_tokens) == "up<user>you: up<assistant>done"
    assert draft.score is not None
    assert draft.score.reward == 4


async def test_empty_first_observation_leaves_the_prompt_as_it_is() -> None:
    async with served() as server:
        draft = await played(server, TextServices(says("done")), observation_field="")
    assert draft.prompt_tokens.tolist() == PROMPT.tokens.tolist()
    assert draft.tool_calls[0].result == '{"board": {"text": "you: done"}}'


async def test_answer_that_is_no_json_object_is_an_error_that_the_policy_reads() -> None:
    answers = ("[up", "[1]", '{"message": 5}', '<think>{}</think>\n{"message": "done"}')
    services = TextServices(says(*answers))
    async with served() as server:
        draft = await played(server, services, action_field="", reset_fields=["seed"])
    *errors, last = draft.tool_calls
    assert [call.result for call in errors] == [
        "Error: expected a JSON object",
        "Error: expected a JSON object",
        "Error: message: Not a string",
    ]
    assert json.loads(errors[0].arguments) == {"input": "[up"}
    assert json.loads(last.arguments) == {"message": "done"}
    assert draft.score is not None
    assert dict(draft.score.parts)["errors"] == 3


async def test_reasoning_and_white_space_are_not_part_of_an_action() -> None:
    services = TextServices(says("<think>Up?</think>\n\nup \n", "done"))
    async with served() as server:
        draft = await played(server, services, reset_fields=["seed"])
    assert draft.tool_calls[0].arguments == '{"message": "up"}'


def calls(*arguments: Any, name: str = "add") -> str:
    return "\n".join(json.dumps({"name": name, "arguments": each}) for each in arguments)


async def test_calls_of_one_answer_are_steps_and_messages_of_tools() -> None:
    several = calls({"numbers": [1, 2]}, {}) + "\n" + calls({}, name="multiply")
    services = TextServices(says(several, "I am done."), is_chat=True)
    async with served(has_tools=True) as server:
        draft = await played(server, services, mcp=True, observation_field="")
    shown = {
        "type": "function",
        "function": {
            "name": TOOL["name"],
            "description": TOOL["description"],
            "parameters": TOOL["input_schema"],
        },
    }
    beginning = f"{json.dumps([shown])}<user>{PROMPT.text}<assistant>"
    assert services.decode(draft.prompt_tokens) == beginning
    results = [call.result for call in draft.tool_calls]
    unknown = "Error: expected one of the tools add, found 'multiply'"
    assert results == ["3", "Error: expected numbers", unknown]
    assert [call.name for call in draft.tool_calls] == ["add", "add", "multiply"]
    following = "".join(f"<tool>{result}" for result in results) + "<assistant>I am done."
    assert services.decode(draft.output_tokens) == several + following
    assert draft.score is not None
    assert (draft.score.reward, draft.finish_reason) == (1.0, "stop")


async def test_calls_after_the_end_and_beyond_the_limit_are_not_made() -> None:
    nine, three = {"numbers": [9]}, {"numbers": [3]}
    async with served(has_tools=True) as server:
        for answer, limit, num_calls in (
            (calls(nine, three), 5, 1),
            (calls(three, three, three), 2, 2),
        ):
            services = TextServices(says(answer), is_chat=True)
            settings = {"mcp": True, "observation_field": "", "max_actions": limit}
            draft = await played(server, services, **settings)
            assert len(draft.tool_calls) == num_calls


@pytest.mark.parametrize(
    ("settings", "max_model_len", "limit"),
    [
        ({"max_actions": 1}, 200, "workflow.max_actions (1)"),
        ({"episode_timeout_s": 1e-9}, 200, "workflow.episode_timeout_s (1e-09)"),
        ({}, 12, "generation.max_model_len"),
    ],
)
async def test_limit_ends_an_episode_with_its_reward(
    settings: dict[str, Any], max_model_len: int, limit: str
) -> None:
    services = TextServices(says("up"), max_model_len=max_model_len)
    async with served() as server:
        draft = await played(server, services, observation_field="", **settings)
    assert draft.finish_reason == "length"
    assert draft.loss_mask.all()
    assert draft.score is not None
    assert (draft.score.reward, draft.score.message) == (2.0, f"ended by {limit}")


async def test_long_observation_is_cut() -> None:
    services = TextServices(says("a" * 50, "done"))
    async with served() as server:
        draft = await played(server, services, reset_fields=["seed"], max_observation_characters=8)
    assert draft.tool_calls[0].result == "you: aaa (47 characters left out)"


@pytest.mark.parametrize(
    ("answer", "settings", "reason"),
    [
        ("fail", {}, "step failed: no such move"),
        ("drop", {}, "connection lost at step, code 1006"),
        ("hang", {"timeout_s": 0.2}, "no answer to step within 0.2 s"),
        ("up", {"action_field": "text"}, "text: Extra inputs are not permitted"),
        ("up", {"observation_field": "board.picture"}, "expected a field 'picture', found"),
        ("up", {"reset_fields": ["level"]}, "no column 'level' to reset with"),
        ("up", {"mcp": True, "action_field": ""}, "step failed: Invalid message type: Extra"),
    ],
)
async def test_failure_of_the_environment_fails_the_member_with_the_reason(
    answer: str, settings: dict[str, Any], reason: str
) -> None:
    services = TextServices(says(answer), is_chat=True)
    async with served() as server:
        group = await roll_out(server, services, **{"reset_fields": ["seed"], **settings})
    (error,) = group.errors
    assert reason in error


async def test_server_that_cannot_be_reached_is_named() -> None:
    address = "http://127.0.0.1:1"
    async with served() as server:
        group = await roll_out(server, TextServices(says()), server=address)
    assert f"the OpenEnv server {address}: cannot be reached: " in group.errors[0]


async def test_episodes_wait_for_a_session_of_a_full_server() -> None:
    services = TextServices(lambda _: "done")
    async with served(max_sessions=2) as server:
        group = await roll_out(server, services, 5, observation_field="")
        assert group.errors == ()
        late = {"observation_field": "", "episode_timeout_s": 1e-9}
        group = await roll_out(server, services, 5, **late)
    assert ["reset failed: the server is full" in error for error in group.errors] == [True] * 3


class Slow(TextServices):
    """A policy that takes more than a second for an answer."""

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        await asyncio.sleep(1.2)
        return await super().generate(request)


async def test_connection_stays_while_the_policy_generates() -> None:
    async with served(heartbeat_s=0.5) as server:
        draft = await played(server, Slow(says("up", "done")), observation_field="")
    assert len(draft.tool_calls) == 2


async def test_connection_of_a_cancelled_episode_is_closed() -> None:
    async with served() as server:
        episode = asyncio.create_task(roll_out(server, Slow(says("up")), observation_field=""))
        while not server.app[OPEN]:
            await asyncio.sleep(0.01)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode


def play(command: str, answer: str = "done") -> RolledOutGroup:
    workflow = OpenEnv.model_validate({"server": command, "action_field": "message"})
    return asyncio.run(run_group(workflow, episode_of(3), TextServices(lambda _: answer)))


def test_command_starts_one_server_which_is_started_again_if_it_ended() -> None:
    assert play(COMMAND).errors == ()
    first = running_server(COMMAND)
    assert play(COMMAND).errors == ()
    assert running_server(COMMAND) is first
    os.killpg(first.process.pid, 9)
    first.process.wait()
    assert play(COMMAND).errors == ()
    assert running_server(COMMAND) is not first


def test_command_that_ends_is_shown_with_the_end_of_its_output() -> None:
    group = play("seq 9; echo no port {port} >&2; exit 3")
    (error, *_) = group.errors
    assert "its command ended with exit status 3: 1\n2\n" in error
    assert "no port " in error


PROGRAM = """
import sys, time
from areal_flow.rollout.workflows.openenv_client import running_server

print(running_server(sys.argv[1]).process.pid, flush=True)
time.sleep(60)
"""


def test_server_and_what_it_started_end_with_a_kill_9_of_their_generator() -> None:
    command = [sys.executable, "-c", PROGRAM, "sleep 61 & sleep 62; : {port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as generator:
        assert generator.stdout is not None
        shell = psutil.Process(int(generator.stdout.readline()))
        time.sleep(0.3)
        processes = [shell, *shell.children(recursive=True)]
        started = [each.cmdline() for each in processes]
        assert {("sleep", "61"), ("sleep", "62")} <= {tuple(each) for each in started}
        generator.kill()
    _, alive = psutil.wait_procs(processes, timeout=5)
    for process in alive:
        process.kill()
    assert not alive


@pytest.mark.parametrize(
    ("table", "rule"),
    [
        ({"workflow": {"server": "localhost:8000"}}, "must be an address"),
        ({"workflow": {"observation_template": "{message}"}}, "must contain {observation}"),
        ({"workflow": {"mcp": True}, "prompts": {"chat_template": False}}, "workflow.mcp needs"),
        ({"rewards": [{"verifier": "exact"}]}, r"nothing asks \['exact'\].*set rewards = \[\]$"),
    ],
)
def test_mistake_in_settings_is_reported_before_a_run(table: dict[str, Any], rule: str) -> None:
    workflow = {"name": "openenv", "server": "http://localhost:8000", **table.get("workflow", {})}
    with pytest.raises(ConfigError, match=rule):
        build_recipe({**table, "workflow": workflow}, source="test")


def test_environment_needs_no_rewards_and_is_named_as_the_verifier() -> None:
    workflow = {"name": "openenv", "server": "http://localhost:8000"}
    recipe = build_recipe({"workflow": workflow}, source="test")
    assert recipe.rewards == ()
    assert recipe.environment == "openenv:http://localhost:8000"
