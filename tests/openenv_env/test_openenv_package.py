"""Environments of `openenv-core`, played in its own server; for `nox -s tests_openenv`."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pytest

from areal_flow.rollout.workflows.episode import RolledOutGroup, run_group
from areal_flow.rollout.workflows.openenv import OpenEnv
from tests.episodes import PROMPT, TextServices, episode_of

PYTHON = os.environ.get("OPENENV_PYTHON", "")
if not PYTHON:
    pytest.skip("OPENENV_PYTHON names no Python with openenv-core", allow_module_level=True)
COMMAND = f"{PYTHON} -P {Path(__file__).with_name('environments.py')} {{}} {{{{port}}}}"
NUM_EPISODES = 50


def guess(text: str) -> str:
    """Search by halving."""
    low, high = 1, 100
    for number, hint in re.findall(r"(\d+)\n(higher|lower)", text):
        low, high = (int(number) + 1, high) if hint == "higher" else (low, int(number) - 1)
    return str((low + high) // 2)


async def play(workflow: OpenEnv, services: TextServices) -> list[RolledOutGroup]:
    """Play 50 episodes, five at a time, after one more; print how long both took."""
    groups, began = [], perf_counter()
    warm = replace(episode_of(1), prompt=replace(PROMPT, metadata={"seed": 0}))
    assert not (await run_group(workflow, warm, services)).errors
    start_s, began = perf_counter() - began, perf_counter()
    for index in range(NUM_EPISODES // 5):
        prompt = replace(PROMPT, metadata={"seed": index})
        groups.append(await run_group(workflow, replace(episode_of(5), prompt=prompt), services))
    drafts = [draft for group in groups for _, draft in group.drafts]
    num_steps, seconds = sum(len(draft.tool_calls) for draft in drafts), perf_counter() - began
    print(f"{len(drafts)} episodes, {num_steps} steps, {seconds:.2f} s; start {start_s:.1f} s")
    assert [group.errors for group in groups] == [()] * len(groups)
    return groups


async def test_game_is_won_by_text() -> None:
    fields = {"action_field": "number", "observation_field": "text", "reset_fields": ["seed"]}
    workflow = OpenEnv.model_validate({"server": COMMAND.format("guess"), **fields})
    for group in await play(workflow, TextServices(guess)):
        assert len({len(draft.tool_calls) for _, draft in group.drafts}) == 1
        for _, draft in group.drafts:
            assert draft.score is not None
            num_steps = len(draft.tool_calls)
            assert draft.score.reward == pytest.approx(1 - 0.1 * (num_steps - 1))
            assert json.loads(draft.score.extra["state"])["step_count"] == num_steps
            assert draft.tool_calls[-1].result == "right"


async def test_tools_are_called_by_mcp() -> None:
    workflow = OpenEnv.model_validate(
        {"server": COMMAND.format("till"), "mcp": True, "reset_fields": ["seed"]}
    )
    calls = [{"name": name, "arguments": {"price": 1}} for name in ("add", "subtract", "add")]
    services = TextServices(lambda _: "\n".join(map(json.dumps, calls)), is_chat=True)
    for index, group in enumerate(await play(workflow, services)):
        for _, draft in group.drafts:
            results = [call.result for call in draft.tool_calls if call.name == "add"]
            assert results == [f"total {n}" for n in range(1, 3 + index % 5)]
            assert draft.score is not None
            assert draft.score.reward == 1.0
    shown = services.decode(services.requests[0].prompt_tokens)
    assert '"description": "Add a price."' in shown
    assert "<tool>" in services.decode(services.requests[-1].prompt_tokens)


async def test_wrong_field_fails_and_wrong_value_is_read_by_the_policy() -> None:
    server = COMMAND.format("guess")
    wrong = await run_group(
        OpenEnv(server=server, action_field="text"), episode_of(1), TextServices(guess)
    )
    assert "number: Field required; text: Extra inputs are not permitted" in wrong.errors[0]
    workflow = OpenEnv(server=server, action_field="number", max_actions=1)
    group = await run_group(workflow, episode_of(1), TextServices(lambda _: "seven"))
    ((_, draft),) = group.drafts
    assert draft.tool_calls[0].result.startswith("Error: number: Input should be a valid integer")


async def test_episodes_wait_for_a_session() -> None:
    workflow = OpenEnv(server=COMMAND.format("guess"), action_field="number")
    group = await run_group(workflow, episode_of(12), TextServices(guess))
    assert group.errors == ()
    short = workflow.model_copy(update={"episode_timeout_s": 1e-9})
    group = await run_group(short, episode_of(12), TextServices(guess))
    assert len(group.errors) == 7
    assert "reset failed" in group.errors[0]
