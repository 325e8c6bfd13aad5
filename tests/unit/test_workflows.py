"""Conversations: discounts, ends, failures, and rows that become conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from areal_flow.core.errors import ConfigError, EngineError
from areal_flow.core.types import (
    Completion,
    GroupRequest,
    Prompt,
    RewardPart,
    Score,
    Tokens,
    VersionSpan,
    as_tokens,
)
from areal_flow.rollout.workflows.episode import (
    Coalescer,
    EpisodeContext,
    TrajectoryDraft,
    run_group,
    turn_seed,
)
from areal_flow.rollout.workflows.registry import ImportedWorkflow, load_workflow
from areal_flow.rollout.workflows.turns import MultiTurn, SingleTurn
from tests.episodes import PROMPT, STOP, FakeServices, episode_of, wrong
from tests.plain import plain


def conversation(services: FakeServices, **settings: object) -> TrajectoryDraft:
    """Return the trajectories of the first member that stopped by itself."""
    workflow = MultiTurn.model_validate(settings)
    group = asyncio.run(run_group(workflow, episode_of(), services))
    return next(d for _, d in group.drafts if d.branch == 0 and STOP in d.output_tokens)


def num_stops(draft: TrajectoryDraft) -> int:
    return int((draft.output_tokens == STOP).sum())


def end_of_first_answer(draft: TrajectoryDraft) -> int:
    return int(np.argmax(draft.output_tokens == STOP)) + 1


def right_at_turn(turn: int) -> FakeServices:
    """Return services whose judge accepts only the answers of one turn."""

    def judge(_: Tokens) -> Score:
        right = len(services.scored) == turn + 1
        parts = (RewardPart("numeric", float(right)),)
        return Score(float(right), "correct" if right else "incorrect", message="no", parts=parts)

    services = FakeServices(judge, max_model_len=500, max_new_tokens=200)
    return services


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_reward_is_discounted_by_its_turn(turn: int) -> None:
    services = right_at_turn(turn)
    draft = conversation(services, max_turns=4, turn_discount=0.5)
    assert draft.score is not None
    assert draft.score.reward == 0.5**turn
    assert draft.score.parts == (RewardPart("numeric", 1.0),)
    assert num_stops(draft) == turn + 1 == len(services.scored)


def test_message_of_the_verifier_is_the_next_user_turn_and_carries_no_gradient() -> None:
    services = right_at_turn(1)
    draft = conversation(services, max_turns=3, message_template="<{message}>")
    message = services.encode("<no>")
    begins = end_of_first_answer(draft)
    environment = slice(begins, begins + len(message))
    assert plain(draft.output_tokens[environment]) == plain(message)
    assert plain(draft.loss_mask[environment]) == [False] * 4
    assert plain(draft.behavior_logprobs[environment]) == [0.0] * 4
    assert sum(draft.loss_mask) == len(draft.output_tokens) - 4


def test_verifier_without_a_message_leaves_it_to_the_recipe() -> None:
    services = FakeServices(lambda tokens: Score(0.0, "incorrect"), max_model_len=500)
    draft = conversation(services, message_template="{message}", wrong_answer_message="again")
    assert services.encode("again")[0] == draft.output_tokens[end_of_first_answer(draft)]


@pytest.mark.parametrize(
    ("services", "settings", "num_answers"),
    [
        (FakeServices(wrong, max_model_len=500), {"max_turns": 3}, 3),
        (FakeServices(wrong, max_model_len=500), {"max_turns": 1}, 1),
        (FakeServices(lambda _: Score(None, "error", error="it broke")), {"max_turns": 3}, 1),
        (
            FakeServices(lambda _: Score(0.0, "incorrect"), max_model_len=14, max_new_tokens=12),
            {"max_turns": 3},
            1,
        ),
    ],
    ids=["all turns", "one turn", "the verifier failed", "no room"],
)
def test_conversation_ends_at_a_limit_with_a_completion(
    services: FakeServices, settings: dict[str, int], num_answers: int
) -> None:
    template = {"message_template": "{message}", "wrong_answer_message": "x" * 12}
    episode = episode_of(group_size=24)
    group = asyncio.run(run_group(MultiTurn(**template, **settings), episode, services))
    answers = [num_stops(draft) for _, draft in group.drafts]
    assert max(answers) == num_answers
    assert all(len(draft.tokens) <= services.max_model_len for _, draft in group.drafts)
    assert all(draft.loss_mask[-1] for _, draft in group.drafts), "it ends with a completion"


def test_conversation_that_is_late_is_cut_and_says_so_only_where_it_would_go_on() -> None:
    late = conversation(FakeServices(wrong, max_model_len=500), max_turns=3, episode_timeout_s=1e-9)
    assert (num_stops(late), late.finish_reason) == (1, "length")
    assert late.score is not None
    assert late.score.message == "ended by workflow.episode_timeout_s (1e-09)"
    last = conversation(FakeServices(wrong, max_model_len=500), max_turns=1, episode_timeout_s=1e-9)
    assert last.finish_reason == "stop"


@dataclass
class StopsAt:
    """A user's workflow: its completion has a stop string of its own."""

    string: str

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        completion = await context.generate(prompt.tokens, 0, stop_strings=(self.string,))
        return [TrajectoryDraft(prompt.tokens).with_completion(completion)]


@dataclass
class BoundBySeed:
    """A user's workflow: each member's completion has its own limit."""

    num_bounds: int
    least: int = 1
    bounds: list[int] = field(default_factory=list)

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        bound = self.least + context.seed % self.num_bounds
        self.bounds.append(bound)
        completion = await context.generate(prompt.tokens, 0, max_new_tokens=bound)
        return [TrajectoryDraft(prompt.tokens).with_completion(completion)]


@pytest.mark.parametrize("of_evaluation", [{}, {"stop_strings": ("of an evaluation",)}])
def test_stop_strings_of_a_completion_are_added_to_those_that_hold_anyway(
    of_evaluation: dict[str, tuple[str, ...]],
) -> None:
    class Recording(FakeServices):
        async def generate(self, request: GroupRequest) -> Sequence[Completion]:
            without = replace(request.sampling, stop_strings=())
            completions = await super().generate(replace(request, sampling=without))
            self.requests[-1] = request
            return completions

    services = Recording()
    services.sampling = replace(services.sampling, stop_strings=("of the recipe",))
    episode = replace(episode_of(), sampling=of_evaluation)
    group = asyncio.run(run_group(StopsAt("its own"), episode, services))
    assert not group.errors
    (request,) = services.requests
    (earlier,) = of_evaluation.get("stop_strings", ("of the recipe",))
    assert request.sampling.stop_strings == (earlier, "its own")


def test_a_completion_is_as_long_as_its_workflow_and_the_recipe_allow() -> None:
    workflow = BoundBySeed(num_bounds=30)
    services = FakeServices(max_new_tokens=12)
    group = asyncio.run(run_group(workflow, episode_of(group_size=40), services))
    cut_off = 0
    for (_, draft), bound in zip(group.drafts, workflow.bounds, strict=True):
        length = len(draft.output_tokens)
        assert length == min(bound, 12) or draft.output_tokens[-1] == STOP
        cut_off += draft.finish_reason == "length"
    assert cut_off > 10
    assert len({len(draft.output_tokens) for _, draft in group.drafts}) > 5


def test_a_completion_of_no_tokens_is_refused() -> None:
    workflow = BoundBySeed(num_bounds=1, least=0)
    group = asyncio.run(run_group(workflow, episode_of(), FakeServices()))
    assert group.has_failed
    assert all("max_new_tokens of at least 1, found 0" in error for error in group.errors)


def test_truncated_answer_is_not_requested_again() -> None:
    services = FakeServices(wrong, max_new_tokens=1)
    group = asyncio.run(run_group(MultiTurn(), episode_of(group_size=40), services))
    cut_off = [draft for _, draft in group.drafts if draft.finish_reason == "length"]
    assert any(len(draft.output_tokens) == 1 for draft in cut_off)
    assert all(draft.output_tokens[0] == STOP or len(draft.output_tokens) == 1 for draft in cut_off)


def test_environment_is_labelled_with_the_version_before_it() -> None:
    draft = TrajectoryDraft(as_tokens([1])).with_completion(
        completion_of([2, 0], [-1.0, -2.0], VersionSpan(3, 1), VersionSpan(4, 1))
    )
    extended = draft.with_environment((5, 6, 7))
    assert extended.version_spans == (VersionSpan(3, 1), VersionSpan(4, 4))
    answered = extended.with_completion(completion_of([8], [-3.0], VersionSpan(6, 1)))
    assert answered.version_spans == (VersionSpan(3, 1), VersionSpan(4, 4), VersionSpan(6, 1))
    assert plain(answered.output_tokens) == [2, 0, 5, 6, 7, 8]
    assert plain(answered.behavior_logprobs) == [-1.0, -2.0, 0.0, 0.0, 0.0, -3.0]
    assert plain(answered.loss_mask) == [True, True, False, False, False, True]
    assert answered.finish_reason == "length"
    with pytest.raises(ValueError, match="expected a completion before"):
        TrajectoryDraft(as_tokens([1])).with_environment([5])


def completion_of(tokens: list[int], logprobs: list[float], *spans: VersionSpan) -> Completion:
    return Completion(as_tokens(tokens), np.array(logprobs, np.float32), spans, "length")


def test_draft_whose_columns_do_not_align_is_refused() -> None:
    with pytest.raises(ValueError, match="of 2 output tokens"):
        TrajectoryDraft(as_tokens([1])).with_completion(
            completion_of([2, 3], [-1.0], VersionSpan(0, 2))
        )


def test_branches_share_the_first_answer_and_train_it_once() -> None:
    services = FakeServices(wrong, max_model_len=500, max_new_tokens=200)
    workflow = MultiTurn(max_turns=2, num_branches=3)
    group = asyncio.run(run_group(workflow, episode_of(group_size=1), services))
    assert [draft.branch for _, draft in group.drafts] == [0, 1, 2]
    first, *others = [draft for _, draft in group.drafts]
    shared = end_of_first_answer(first)
    for other in others:
        assert plain(other.output_tokens[:shared]) == plain(first.output_tokens[:shared])
        assert plain(other.behavior_logprobs[:shared]) == plain(first.behavior_logprobs[:shared])
        assert not any(other.loss_mask[:shared])
    assert all(first.loss_mask[:shared])
    assert len({draft.output_tokens.tobytes() for _, draft in group.drafts}) == 3
    assert len(services.requests) == 2, "the second answers are one request, too"
    assert len(services.scored) == 2


class FailsFor(SingleTurn):
    """Single turns that fail for some members."""

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        drafts = await super().run(prompt, context)
        if len(drafts[0].output_tokens) % 2:
            raise KeyError("what a tool returned")
        return drafts


def test_member_that_fails_for_good_is_recorded_and_the_group_goes_on() -> None:
    expected = asyncio.run(run_group(SingleTurn(), episode_of(), FakeServices()))
    even = [(m, d) for m, d in expected.drafts if len(d.output_tokens) % 2 == 0]
    group = asyncio.run(run_group(FailsFor(), episode_of(), FakeServices()))
    failed = [(m, d) for m, d in group.drafts if d.finish_reason == "error"]
    assert plain([each for each in group.drafts if each not in failed]) == plain(even)
    assert 0 < len(even) < 6
    assert {m for m, _ in failed} == set(range(6)) - {m for m, _ in even}
    assert all(plain(draft.tokens) == plain(PROMPT.tokens) for _, draft in failed)
    assert len(group.errors) == 6 - len(even)
    assert all(
        e.startswith("KeyError: 'what a tool returned' (at run, test_workflows.py, line")
        for e in group.errors
    )


class MakesNothing(SingleTurn):
    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        return []


class RepeatsABranch(SingleTurn):
    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        return [*await super().run(prompt, context)] * 2


class SaysNothing(SingleTurn):
    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        return [TrajectoryDraft(prompt.tokens)]


@pytest.mark.parametrize(
    ("workflow", "cause"),
    [
        (MakesNothing(), "found branches []"),
        (RepeatsABranch(), "found branches [0, 0]"),
        (SaysNothing(), "expected a completion"),
    ],
)
def test_workflow_with_an_invalid_result_has_failed(workflow: SingleTurn, cause: str) -> None:
    group = asyncio.run(run_group(workflow, episode_of(), FakeServices()))
    assert group.has_failed
    assert len(group.errors) == 6
    assert cause in group.errors[0]


class DownAfterOneTurn(FakeServices):
    """A generator that breaks, with one of its requests still open."""

    def __init__(self) -> None:
        super().__init__(wrong, max_model_len=500)
        self.num_open = 0

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        if len(self.requests) == 2:
            raise EngineError("the engine is down")
        if len(self.requests) == 1:
            self.requests.append(request)
            self.num_open += 1
            try:
                await asyncio.sleep(3600)
            finally:
                self.num_open -= 1
        return await super().generate(request)


def test_generator_that_is_down_fails_the_group_and_leaves_nothing_running() -> None:
    services = DownAfterOneTurn()

    async def fail() -> int:
        with pytest.raises(EngineError, match="the engine is down"):
            await run_group(MultiTurn(), episode_of(), services)
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(fail()) == 1
    assert services.num_open == 0


def test_equal_questions_of_one_turn_become_one_request_and_later_ones_another() -> None:
    sent: list[tuple[str, list[int]]] = []

    async def send(key: str, items: list[int]) -> list[int]:
        sent.append((key, items))
        return [item * 10 for item in items]

    async def ask_all() -> list[int]:
        coalescer = Coalescer(send)
        first = await asyncio.gather(*(coalescer.ask("a" if i < 3 else "b", i) for i in range(5)))
        return [*first, await coalescer.ask("a", 7)]

    assert asyncio.run(ask_all()) == [0, 10, 20, 30, 40, 70]
    assert sent == [("a", [0, 1, 2]), ("b", [3, 4]), ("a", [7])]


def test_training_and_evaluation_of_one_submission_never_share_a_request_id() -> None:
    services = FakeServices(wrong)

    async def side_by_side() -> None:
        await asyncio.gather(*(run_group(SingleTurn(), episode_of(), services) for _ in range(2)))

    asyncio.run(side_by_side())
    ids = [request.request_id for request in services.requests]
    assert len(ids) == len(set(ids)) == 2


def test_request_ends_when_nobody_waits_for_it_and_not_before() -> None:
    ended: list[str] = []

    async def send(key: str, items: list[int]) -> list[int]:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            ended.append(key)
            raise
        return items

    async def cancel_some() -> list[int]:
        coalescer = Coalescer(send)
        requests = (("a", 1), ("a", 2), ("b", 3))
        kept, given_up, alone = (
            asyncio.create_task(coalescer.ask(*request)) for request in requests
        )
        await asyncio.sleep(0.01)
        given_up.cancel()
        alone.cancel()
        await asyncio.sleep(0.01)
        return [await kept]

    assert asyncio.run(cancel_some()) == [1]
    assert ended == ["b"]


def test_seeds_follow_from_member_turn_and_branch() -> None:
    assert turn_seed(12345, 0) == 12345
    assert turn_seed(12345, 1) == turn_seed(12345, 1, 0) == 5716958070147783288
    seeds = {turn_seed(m, t, b) for m in range(9) for t in range(9) for b in range(9)}
    assert len(seeds) == 9**3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_context_that_is_full_fails_the_member() -> None:
    services = FakeServices(max_model_len=len(PROMPT.tokens))
    group = asyncio.run(run_group(SingleTurn(), episode_of(group_size=1), services))
    assert "expected fewer than generation.max_model_len (2)" in group.errors[0]


@pytest.mark.parametrize(
    ("path", "settings", "cause"),
    [
        ("nowhere:Flow", {}, "workflow.path = 'nowhere:Flow' cannot be imported"),
        ("json:dumps", {}, "workflow.settings = {}"),
        ("builtins:dict", {"a": 1}, "it has no `run`"),
    ],
)
def test_invalid_workflow_is_refused(path: str, settings: dict[str, int], cause: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_workflow(ImportedWorkflow(name="imported", path=path, settings=settings), Path())
    assert cause in str(raised.value)
