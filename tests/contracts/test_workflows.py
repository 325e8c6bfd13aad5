"""The contract of every workflow's trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from areal_flow.core.types import EngineStats, Prompt, Score
from areal_flow.log.codec import rollout_rows, scored_table
from areal_flow.rollout.workflows.episode import (
    EpisodeContext,
    RolledOutGroup,
    TrajectoryDraft,
    Workflow,
    run_group,
)
from areal_flow.rollout.workflows.openenv import OpenEnv
from areal_flow.rollout.workflows.registry import ImportedWorkflow, load_workflow
from areal_flow.rollout.workflows.tool_use import ToolUse
from areal_flow.rollout.workflows.turns import MultiTurn, SingleTurn
from schemas import TrajectoryRow, validate
from tests.episodes import PROMPT, FakeServices, episode_of, exact_logprob
from tests.openenv_server import COMMAND
from tests.plain import plain


class AsksACalculator:
    """A user's workflow: a tool result between two completions, scored by the recipe."""

    def __init__(self, mark: str = "=") -> None:
        self.mark = mark

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        draft = TrajectoryDraft(prompt.tokens).with_completion(
            await context.generate(prompt.tokens, turn=0)
        )
        result = await context.call_tool("tools:add", context.decode(draft.output_tokens))
        extended = draft.with_environment(context.encode(f"{self.mark}{result}"))
        return [extended.with_completion(await context.generate(extended.tokens, turn=1))]


SUBJECTS: dict[str, Workflow] = {
    "single_turn": SingleTurn(),
    "multi_turn": MultiTurn(max_turns=4),
    "multi_turn, branching": MultiTurn(max_turns=3, num_branches=3),
    "tool_use": ToolUse(tools=("any:5",), call_start="3 ", call_end=" 0", max_calls=2),
    "openenv": OpenEnv(server=COMMAND, action_field="message", max_actions=3),
    "imported": load_workflow(
        ImportedWorkflow(
            name="imported", path=f"{__name__}:AsksACalculator", settings={"mark": "#"}
        ),
        Path(),
    ),
}


@pytest.fixture(params=SUBJECTS)
def workflow(request: pytest.FixtureRequest) -> Workflow:
    return SUBJECTS[request.param]


def roll_out(workflow: Workflow, services: FakeServices, *, attempt: int = 0) -> RolledOutGroup:
    return asyncio.run(run_group(workflow, episode_of(attempt=attempt), services))


def test_tokens_are_appended_and_carry_the_log_probability_they_were_drawn_with(
    workflow: Workflow,
) -> None:
    group = roll_out(workflow, FakeServices(tokens_per_version=5))
    assert {member for member, _ in group.drafts} == set(range(6))
    for _, draft in group.drafts:
        assert plain(draft.prompt_tokens) == plain(PROMPT.tokens)
        assert any(draft.loss_mask)
        position = len(draft.prompt_tokens)
        for token, chosen, logprob in zip(
            draft.output_tokens, draft.loss_mask, draft.behavior_logprobs, strict=True
        ):
            exact = exact_logprob(draft.tokens[position - 1], token)
            assert logprob == pytest.approx(exact) or (logprob == 0.0 and not chosen)
            position += 1


def test_versions_cover_every_token_and_never_decrease(workflow: Workflow) -> None:
    for _, draft in roll_out(workflow, FakeServices(tokens_per_version=3)).drafts:
        versions = [span.version for span in draft.version_spans]
        assert versions == sorted(set(versions))
        assert sum(span.length for span in draft.version_spans) == len(draft.output_tokens)


def test_another_attempt_makes_the_same_trajectories(workflow: Workflow) -> None:
    first, second = (roll_out(workflow, FakeServices(), attempt=attempt) for attempt in (0, 1))
    assert plain(_without_seconds(first)) == plain(_without_seconds(second))
    assert len({draft.output_tokens.tobytes() for _, draft in first.drafts}) > 2


def _without_seconds(group: RolledOutGroup) -> RolledOutGroup:
    """Return a group as if its calls of tools had taken no time."""
    drafts = tuple(
        (
            member,
            replace(draft, tool_calls=tuple(c._replace(duration_s=0.0) for c in draft.tool_calls)),
        )
        for member, draft in group.drafts
    )
    return replace(group, drafts=drafts)


def test_no_two_completions_share_a_seed(workflow: Workflow) -> None:
    services = FakeServices()
    roll_out(workflow, services)
    seeds = [seed for request in services.requests for seed in request.seeds]
    assert len(set(seeds)) == len(seeds)
    assert len({request.request_id for request in services.requests}) == len(services.requests)


@pytest.mark.parametrize("workflow", [n for n in SUBJECTS if n != "openenv"], indirect=True)
def test_members_first_turn_is_one_request(workflow: Workflow) -> None:
    """But for environments, which answer `reset` one by one."""
    services = FakeServices()
    roll_out(workflow, services)
    first, *later = services.requests
    assert plain(first.prompt_tokens) == plain(PROMPT.tokens)
    assert first.seeds == episode_of().seeds
    assert all(plain(request.prompt_tokens) != plain(PROMPT.tokens) for request in later)


def test_each_sampled_token_is_trained_once(workflow: Workflow) -> None:
    services = FakeServices()
    group = roll_out(workflow, services)
    num_trained = sum(sum(draft.loss_mask) for _, draft in group.drafts)
    sampled = [
        len(completion.tokens)
        for request in list(services.requests)
        for completion in asyncio.run(services.generate(request))
    ]
    assert num_trained == sum(sampled)


def test_trajectories_are_rows_of_the_schema(workflow: Workflow) -> None:
    episode, group = episode_of(), roll_out(workflow, FakeServices())
    table, notes = rollout_rows(
        [(episode, group)],
        generator="g",
        started_at=datetime.now(UTC),
        engine_stats=EngineStats("i", 5, 0.1),
    )
    given = notes.scores
    assert given == tuple(draft.score for _, draft in group.drafts)
    scores = [score or Score(0.5, "incorrect") for score in given]
    scored = scored_table(table, scores, verifier="v@0")
    validate(scored, TrajectoryRow)
    assert scored["reward"].to_pylist() == [score.reward for score in scores]
    assert scored["loss_mask"].to_pylist() == [plain(draft.loss_mask) for _, draft in group.drafts]
    assert notes.prompts == {episode.submission_index: episode.prompt}
