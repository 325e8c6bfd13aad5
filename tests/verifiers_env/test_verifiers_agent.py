"""Environments of `verifiers`, played against the endpoint; for `nox -s tests_verifiers`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from areal_flow.core.errors import ArealFlowError
from areal_flow.rollout.workflows.agent import Agent
from areal_flow.rollout.workflows.episode import contexts_of
from tests.episodes import PROMPT, FakeServices, episode_of

pytest.importorskip("verifiers")
sys.path.insert(0, str(Path(__file__).parent))

from areal_flow.rollout.workflows.verifiers_agent import rows

AGENT = Agent(path="areal_flow.rollout.workflows.verifiers_agent:solve")


async def test_environment_is_played_and_its_reward_is_the_trajectorys() -> None:
    prompts = [*rows("two_word_taskset", 5)]
    assert [row["question"] for row in prompts] == ["say one", "say two", "fail"]
    (context,) = contexts_of(episode_of(1), FakeServices(max_model_len=500))
    (draft,) = await AGENT.run(replace(PROMPT, metadata=prompts[1]), context)
    assert draft.score is not None
    assert draft.score.reward == len(draft.output_tokens)
    assert not any(name.startswith("AREAL_FLOW_API_KEY") for name in os.environ)


async def test_environment_that_fails_fails_the_member_with_its_cause() -> None:
    (*_, row) = rows("two_word_taskset", 3)
    (context,) = contexts_of(episode_of(1), FakeServices(max_model_len=500))
    with pytest.raises(ArealFlowError, match=r"two_word_taskset failed.*the environment's own"):
        await AGENT.run(replace(PROMPT, metadata=row), context)
