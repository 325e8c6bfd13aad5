"""Agents written against the OpenAI SDK, its real client, and the trajectories of their calls."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from areal_flow.core.errors import ArealFlowError, EngineError
from areal_flow.core.types import Completion, GroupRequest, Score, Tokens, as_tokens
from areal_flow.rollout.workflows.agent_messages import (
    CallRefused,
    ContentStream,
    answer_message,
    normal_message,
)
from areal_flow.rollout.workflows.episode import FAILURES, contexts_of, run_group
from tests.agents import (
    HI,
    TOO_LONG,
    TOOLS,
    Create,
    Scripted,
    answer,
    run,
    run_talk,
    settled,
    talking,
    user_messages,
)
from tests.episodes import LOGITS, PROMPT, FakeServices, episode_of
from tests.fakes import BigramEngine
from tests.plain import plain


async def asks_once(create: Create) -> float:
    await create(messages=HI)
    return 1.0


async def asks_and_forgets(create: Create) -> None:
    await create(messages=HI)


def asks_in_a_thread(base_url: str, api_key: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        client.chat.completions.create(model="m", messages=HI)


async def test_nothing_is_served_when_no_agent_runs() -> None:
    seen: list[str] = []

    async def agent(base_url: str, api_key: str) -> Any:
        seen.append(base_url)
        return await talking(asks_once)(base_url, api_key)

    (context,) = contexts_of(episode_of(1), FakeServices())
    await settled(agent).run(PROMPT, context)
    assert seen[0].startswith("http://127.0.0.1:")
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(f"{seen[0]}/models")


def test_calls_that_go_on_are_one_trajectory_of_what_was_sampled() -> None:
    async def agent(prompt: str, base_url: str, api_key: str) -> float:
        assert prompt == PROMPT.text
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            messages = HI
            for _ in range(2):
                completion = await client.chat.completions.create(model="any", messages=messages)
                message = answer(completion)
                assert completion.usage
                assert completion.usage.completion_tokens == len((message["content"] or "").split())
                messages = [*messages, message, *user_messages("and?")]
        return 0.75

    services = FakeServices(tokens_per_version=3)
    (draft,) = run(agent, services)
    first, second = services.requests
    assert plain(draft.prompt_tokens) == plain(services.encode("uhi"))
    begun = len(first.prompt_tokens)
    sampled = len(second.prompt_tokens) - begun - len(services.encode("uan"))
    assert plain(draft.tokens[: len(second.prompt_tokens)]) == plain(second.prompt_tokens)
    environment = draft.loss_mask[sampled : sampled + 3]
    assert not environment.any()
    assert draft.loss_mask.sum() == len(draft.loss_mask) - 3
    assert sum(span.length for span in draft.version_spans) == len(draft.output_tokens)
    assert draft.score == Score(0.75)


def test_rewritten_history_begins_another_trajectory() -> None:
    async def rewrites(create: Create) -> None:
        message = answer(await create(messages=HI))
        for content in (message["content"], "something else"):
            await create(messages=[*HI, {**message, "content": content}, *user_messages("and?")])

    drafts = run_talk(rewrites)
    assert [draft.branch for draft in drafts] == [0, 1]
    assert {draft.score and draft.score.verdict for draft in drafts} == {"no_reward"}
    assert not drafts[0].loss_mask.all()
    assert drafts[1].loss_mask.all()


class BeginsAnswers(FakeServices):
    """Has a chat template that begins the answer after the messages."""

    def chat(self, *arguments: Any, after: tuple[int, int] | None = None) -> Tokens:
        return as_tokens([*super().chat(*arguments, after=after).tolist(), *self.encode("a")])


class Forgets(FakeServices):
    def chat(self, *arguments: Any, after: tuple[int, int] | None = None) -> Tokens:
        if after is not None:
            raise ValueError("the chat template rewrites earlier answers")
        return super().chat(*arguments, after=after)


OWN = [{"role": "assistant", "content": "I said"}]


@pytest.mark.parametrize(
    ("begin", "new", "tools", "services"),
    [
        (user_messages("something else"), user_messages("and?"), (), FakeServices),
        (HI, [], (), BeginsAnswers),
        (HI, [*OWN, *user_messages("and?")], (), BeginsAnswers),
        (HI, user_messages("and?"), TOOLS, FakeServices),
        (HI, user_messages("and?"), (), Forgets),
    ],
    ids=["other beginning", "nothing new", "own words", "other tools", "template rewrites"],
)
def test_call_that_does_not_go_on_from_an_answer_begins_another_trajectory(
    begin: list[Any], new: list[Any], tools: Any, services: type[FakeServices]
) -> None:
    async def goes_on(create: Create) -> float:
        message = answer(await create(messages=HI))
        await create(messages=[*begin, message, *new], **({"tools": tools} if tools else {}))
        return 1.0

    drafts = run_talk(goes_on, services(tokens_per_version=2))
    assert [draft.branch for draft in drafts] == [0, 1]
    assert all(draft.loss_mask.all() for draft in drafts), "each is a conversation of its own"
    assert len({span.version for draft in drafts for span in draft.version_spans}) > 1


def test_calls_from_one_answer_at_a_time_do_not_share_it() -> None:
    async def asks_twice_at_once(create: Create) -> float:
        history = [*HI, answer(await create(messages=HI))]
        await asyncio.gather(
            *(create(messages=[*history, *user_messages(each)]) for each in ("a", "b"))
        )
        return 0.0

    class Slow(FakeServices):
        async def generate(self, request: GroupRequest) -> Any:
            await asyncio.sleep(0.2)  # both calls come while neither is answered
            return await super().generate(request)

    services = Slow()
    assert sorted(draft.branch for draft in run_talk(asks_twice_at_once, services)) == [0, 1]
    seeds = [seed for request in services.requests for seed in request.seeds]
    assert len(set(seeds)) == len(seeds) == 3


def test_synchronous_agents_get_their_own_threads_and_do_not_delay_weights() -> None:
    """More agents than the event loop has threads wait for each other here."""
    num_agents = 24
    together = threading.Barrier(num_agents, timeout=20)

    def agent(base_url: str, api_key: str) -> float:
        asks_in_a_thread(base_url, api_key)
        together.wait()
        return 1.0

    async def go() -> list[Any]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        contexts = contexts_of(episode_of(num_agents), FakeServices())
        workflow = settled(agent, episode_timeout_s=20)
        busy = [asyncio.ensure_future(workflow.run(PROMPT, each)) for each in contexts[1:]]
        await asyncio.sleep(0.5)
        await asyncio.wait_for(asyncio.to_thread(list), 5)  # as an engine loads weights
        return await asyncio.gather(*busy, workflow.run(PROMPT, contexts[0]))

    drafts = [draft for drafts in asyncio.run(go()) for draft in drafts]
    assert len(drafts) == num_agents
    assert {draft.score and draft.score.reward for draft in drafts} == {1.0}


def test_agent_that_hangs_or_exits_ends_no_other() -> None:
    def hangs(base_url: str, api_key: str) -> float:
        asks_in_a_thread(base_url, api_key)
        threading.Event().wait(30)
        return 1.0

    def exits() -> float:
        sys.exit("enough")

    async def exits_too() -> float:
        sys.exit(3)

    (late,) = run(hangs, episode_timeout_s=0.5)
    assert late.finish_reason == "length"
    for agent in (exits, exits_too):
        with pytest.raises(ArealFlowError, match=r"the agent called sys\.exit"):
            run(agent)


@pytest.mark.parametrize(
    "reward", [float("nan"), float("inf"), "1", [1.0], pytest.param(10**400, id="huge")]
)
def test_reward_that_is_no_finite_number_is_refused_where_it_is_returned(reward: Any) -> None:
    async def returns_it(create: Create) -> Any:
        await create(messages=HI)
        return reward

    with pytest.raises(ArealFlowError, match="expected a finite number as the reward"):
        run_talk(returns_it)


def test_object_whose_call_is_async_is_an_agent() -> None:
    class Asks:
        async def __call__(self, base_url: str, api_key: str) -> Any:
            return await talking(asks_once)(base_url, api_key)

    (draft,) = run(Asks())
    assert draft.score == Score(1.0)


def test_agent_without_async_streams_in_a_thread() -> None:
    def agent(base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            create = partial(client.chat.completions.create, model="m", messages=HI)
            completion = create()
            chunks = [*create(stream=True, stream_options={"include_usage": True})]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert chunks[-1].usage
        assert chunks[-2].choices[0].finish_reason in ("stop", "length")
        assert completion.choices[0].message.role == "assistant"
        return 1.0

    assert len(run(agent)) == 2


class TokenByToken(FakeServices):
    """Samples the next token once the agent has seen the previous one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = asyncio.Semaphore(1)
        self.cancelled = asyncio.Event()

    async def generate(self, request: GroupRequest) -> Any:
        self.requests.append(request)
        engine = BigramEngine(LOGITS, max_num_seqs=64)
        engine.add(request)
        try:
            while True:
                await asyncio.wait_for(self.seen.acquire(), 10)
                if finished := engine.step():
                    return finished[0][1]
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def test_text_is_streamed_as_it_is_sampled_and_the_trajectory_is_the_same() -> None:
    services = TokenByToken()

    async def streams(create: Create) -> float:
        pieces = []
        async for chunk in await create(messages=HI, stream=True):
            if chunk.choices and (piece := chunk.choices[0].delta.content):
                services.seen.release()
                pieces.append(piece)
        assert len(pieces) > 1
        return 1.0

    (streamed,), (unstreamed,) = run_talk(streams, services), run_talk(asks_once)
    assert plain(streamed) == plain(unstreamed)


def test_stream_that_its_client_leaves_is_cancelled() -> None:
    services = TokenByToken()

    async def leaves(create: Create) -> float:
        chunks = await create(messages=HI, stream=True)
        await anext(aiter(chunks))
        await chunks.close()
        await asyncio.wait_for(services.cancelled.wait(), 5)
        services.seen = asyncio.Semaphore(100)
        await create(messages=user_messages("ho"))
        return 1.0

    (draft,) = run_talk(leaves, services)
    assert draft.loss_mask.all()


def test_stream_never_cuts_a_character_nor_shows_what_is_a_call() -> None:
    text = ' Été 🙂 then\n<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    for has_tools, expected in ((False, text), (True, " Été 🙂 then")):
        pieces: list[str] = []
        stream = ContentStream(Scripted().decode, pieces.append, has_tools=has_tools)
        for byte in text.encode():
            stream(byte)
        assert "".join(pieces) == expected
        assert len(pieces) > 5
    tools = [{"type": "function", "function": {"name": "a"}}]
    assert answer_message(text, tools, call_number=0)["content"] == expected


def test_calls_that_are_nested_too_deeply_are_text() -> None:
    text = f'<tool_call>{{"name": "a", "arguments": {"[" * 10**5}}}</tool_call>'
    message = answer_message(text, TOOLS, call_number=0)
    assert message == {"role": "assistant", "content": text}
    nested = {"function": {"name": "a", "arguments": "[" * 10**5}}
    with pytest.raises(CallRefused, match="expected a call of a function"):
        normal_message({"role": "assistant", "tool_calls": [nested]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 17}, "n: expected a number from 1 to 16, found 17"),
        ({"n": 2, "stream": True}, "unsupported n 2 with stream"),
        ({"stop": [*"abcde"]}, "stop: expected up to 4 strings"),
        ({"stop": ["a", ""]}, "stop: expected up to 4 strings, none empty"),
        ({"logprobs": True, "top_logprobs": 2}, "only sampled tokens have log-probabilities"),
        ({"response_format": {"type": "json_object"}}, "bias the trainer's importance weights"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        (
            {"tools": TOOLS, "tool_choice": "required"},
            "unsupported tool_choice 'required': .* use 'auto' or 'none'",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"functions": [{"name": "add"}]}, "use tools"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"extra_body": {"guided_regex": "a+"}}, "guided_regex"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "expected messages"),
        ({"messages": [{"role": "refused", "content": "?"}]}, "chat template"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
        ({"messages": TOO_LONG}, "expected fewer than"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    changes: dict[str, Any], message: str
) -> None:
    async def asks_for_it(create: Create) -> float:
        with pytest.raises(openai.APIStatusError, match=message) as refused:
            await create(**{"messages": HI, **changes})
        assert refused.value.status_code == 400
        return await asks_once(create)

    assert len(run_talk(asks_for_it)) == 1


def test_changes_without_effect_are_accepted() -> None:
    without_effect: dict[str, Any] = {
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "stop": [],
        "user": "u",
        "extra_body": {"reasoning_effort": None},
    }

    async def asks_for_it(create: Create) -> float:
        await create(messages=HI, tools=TOOLS, **without_effect)
        return 1.0

    assert len(run_talk(asks_for_it)) == 1


def test_policy_that_may_call_no_tool_sees_none() -> None:
    offered_tools = list[Any]()

    class Calling(FakeServices):
        def chat(self, messages: Any, tools: Any = (), **after: Any) -> Tokens:
            offered_tools.append(tools)
            return super().chat(messages, tools, **after)

        def decode(self, tokens: Tokens) -> str:
            return CALL

    async def calls_none(create: Create) -> float:
        completions = [
            await create(messages=HI, tools=TOOLS, tool_choice=c) for c in ("auto", "none")
        ]
        assert [bool(each.choices[0].message.tool_calls) for each in completions] == [True, False]
        return 1.0

    run_talk(calls_none, Calling())
    assert [bool(tools) for tools in offered_tools] == [True, False]


def test_sampling_is_the_recipes_whatever_a_call_asks_for() -> None:
    async def asks_for_its_own(create: Create) -> float:
        await create(messages=HI, temperature=0.1, top_p=0.5, seed=3, max_tokens=2)
        return 1.0

    services = FakeServices()
    (draft,) = run_talk(asks_for_its_own, services)
    assert services.requests[0].sampling.temperature == services.sampling.temperature
    assert len(draft.output_tokens) <= 2


def test_first_reward_counts_and_strangers_are_refused() -> None:
    statuses: list[int] = []

    async def agent(base_url: str, api_key: str) -> float:
        await talking(asks_once)(base_url, api_key)
        root = base_url.removesuffix("/v1")
        rewards = ("much", float("nan"), 10**400, 0.25, 1.0)
        posts = [(root, reward, api_key) for reward in rewards]
        async with aiohttp.ClientSession() as http:
            for url, reward, key in (*posts, (root, 1.0, "x"), (f"{root}x", 1.0, api_key)):
                headers = {"Authorization": f"Bearer {key}"}
                body = {"reward": reward}
                async with http.post(f"{url}/reward", json=body, headers=headers) as response:
                    statuses.append(response.status)
        return 0.5

    (draft,) = run(agent)
    assert statuses == [400, 400, 400, 200, 409, 401, 404]
    assert draft.score == Score(0.25)


def test_client_that_goes_away_takes_its_request_with_it() -> None:
    cancelled: list[str] = []

    class Slow(FakeServices):
        async def generate(self, request: GroupRequest) -> Any:
            if len(self.requests) == 0:
                self.requests.append(request)
                try:
                    await asyncio.sleep(60)
                finally:
                    cancelled.append(request.request_id)
            return await super().generate(request)

    async def goes_away(create: Create) -> float:
        with pytest.raises(openai.APITimeoutError):
            await create(messages=HI, timeout=0.2)
        return await asks_once(create)

    (draft,) = run_talk(goes_away, Slow())
    assert len(cancelled) == 1
    assert draft.loss_mask.all()


def test_too_many_calls_and_too_long_episodes_are_cut_and_say_so() -> None:
    async def asks_on(create: Create) -> float:
        for _ in range(2):
            await create(messages=HI)
        with pytest.raises(openai.RateLimitError, match="max_calls"):
            await create(messages=HI)
        return 1.0

    async def sleeps(create: Create) -> None:
        await create(messages=HI)
        await asyncio.sleep(60)

    cut = run_talk(asks_on, max_calls=2)
    assert [draft.finish_reason for draft in cut] == ["length"] * 2
    messages = {draft.score and draft.score.message for draft in cut}
    assert messages == {"ended by workflow.max_calls (2)"}
    (late,) = run_talk(sleeps, episode_timeout_s=3)
    assert (late.finish_reason, late.score.reward) == ("length", None)
    error = late.score.error
    assert "gave no reward before it was ended by workflow.episode_timeout_s (3)" in error
    services = FakeServices()
    (left,) = run_talk(sleeps, services, episode_timeout_s=3, missing_reward="score")
    assert left.score.verdict in ("correct", "incorrect"), "by the recipe's rewards"
    assert left.score.message == "ended by workflow.episode_timeout_s (3)"
    assert [plain(each) for each in services.scored[0]] == [plain(left.output_tokens)]


@pytest.mark.parametrize("handles_it", [True, False])
def test_agent_whose_context_is_full_is_cut_with_the_reason(handles_it: bool) -> None:
    async def asks_on(create: Create) -> float:
        history = HI
        for _ in range(20):
            try:
                completion = await create(messages=history)
            except openai.BadRequestError as error:
                if handles_it and error.code == "context_length_exceeded":
                    return 0.25
                raise
            history = [*history, answer(completion), *user_messages("more")]
        raise AssertionError("the context was never full")

    (draft,) = run_talk(asks_on, missing_reward=0.0)
    assert draft.finish_reason == "length"
    assert draft.score.reward == (0.25 if handles_it else 0.0)
    assert "generation.max_model_len (64)" in draft.score.message


@pytest.mark.parametrize("handles_it", [True, False])
def test_agent_whose_first_call_is_over_the_context_fails_with_the_reason(handles_it: bool) -> None:
    async def asks_too_much(create: Create) -> float:
        with suppress(*([openai.BadRequestError] if handles_it else [])):
            await create(messages=TOO_LONG)
        return 0.0

    async def sleeps() -> None:
        await asyncio.sleep(60)

    with pytest.raises(ArealFlowError, match=r"ended by .*max_model_len \(64\)"):
        run_talk(asks_too_much)
    with pytest.raises(ArealFlowError, match=r"ended by workflow\.episode_timeout_s \(0\.2"):
        run(sleeps, episode_timeout_s=0.2)


def test_agent_that_folds_its_history_has_that_conversation_cut_alone() -> None:
    async def folds(create: Create) -> float:
        history = [*HI, answer(await create(messages=HI)), *TOO_LONG]
        with pytest.raises(openai.BadRequestError, match="max_model_len"):
            await create(messages=history)
        await create(messages=user_messages("in short"))
        return 1.0

    async def asks_shorter(create: Create) -> float:
        history = [*HI, answer(await create(messages=HI))]
        for more in (TOO_LONG, user_messages("ok")):
            with suppress(openai.BadRequestError):
                await create(messages=[*history, *more])
        return 1.0

    first, second = run_talk(folds)
    assert first.score == Score(1.0, message=first.score.message)
    assert first.finish_reason == "length"
    assert "max_model_len (64)" in first.score.message
    assert second.score == Score(1.0)
    (trajectory,) = run_talk(asks_shorter)
    assert trajectory.score == Score(1.0)


@pytest.mark.parametrize("is_grouped", [True, False])
def test_failure_of_an_agents_own_after_a_limit_is_its_failure(is_grouped: bool) -> None:
    async def breaks(create: Create) -> float:
        await create(messages=HI)
        with pytest.raises(openai.RateLimitError):
            await create(messages=HI)
        raise KeyError("the agent's own")

    async def ends_over_it(create: Create) -> None:
        await create(messages=HI)
        try:
            if is_grouped:
                async with asyncio.TaskGroup() as group:
                    group.create_task(asks_and_forgets(create))
            await create(messages=HI)
        except Exception as error:
            raise RuntimeError("no answer") from error

    with pytest.raises(KeyError, match="the agent's own"):
        run_talk(breaks, max_calls=1, missing_reward=0.0)
    (cut,) = run_talk(ends_over_it, max_calls=1, missing_reward=0.0)
    assert cut.score == Score(0.0, message="ended by workflow.max_calls (1)")


@pytest.mark.parametrize(
    ("settings", "reward", "verdict"),
    [
        ({}, None, "no_reward"),
        ({"missing_reward": 0.0}, 0.0, None),
        ({"missing_reward": 1}, 1.0, None),
    ],
)
def test_agent_that_gives_no_reward_has_what_the_recipe_says(
    settings: dict[str, Any], reward: float | None, verdict: str | None
) -> None:
    (draft,) = run_talk(asks_and_forgets, **settings)
    assert (draft.score.reward, draft.score.verdict) == (reward, verdict)
    assert bool(draft.score.error) == (reward is None)


def test_agent_without_a_reward_may_be_scored_by_the_recipe() -> None:
    (left,) = run_talk(asks_and_forgets, missing_reward="score")
    assert left.score is None


def test_agent_that_fails_or_asks_nothing_fails_its_member() -> None:
    async def fails(base_url: str) -> float:
        raise KeyError("the agent's own")

    with pytest.raises(KeyError, match="the agent's own"):
        run(fails)
    with pytest.raises(ArealFlowError, match="had no answer"):
        run(lambda: 1.0)


def test_generator_that_cannot_serve_has_the_group_tried_again() -> None:
    class Broken(FakeServices):
        async def generate(self, request: GroupRequest) -> list[Completion]:
            raise EngineError("out of memory")

    with pytest.raises(EngineError, match="out of memory"):
        run_talk(asks_once, Broken())


def test_calls_of_tools_are_read_from_the_answer() -> None:
    text = 'Let me see.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "add"}}]
    message = answer_message(text, tools, call_number=3)
    (call,) = message["tool_calls"]
    assert message["content"] == "Let me see."
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert answer_message(text, [], call_number=3)["content"] == text
    broken = "<tool_call>{not json}</tool_call>"
    assert answer_message(broken, tools, call_number=3)["content"] == broken


IN_THOUGHT = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"<think>{IN_THOUGHT}</think>", None),
        (f"<think>{IN_THOUGHT}", None),
        (f"the prompt began to think {IN_THOUGHT}</think>\n\nno call", None),
        (f"<think>{IN_THOUGHT}</think>{CALL}", f"<think>{IN_THOUGHT}</think>"),
        (f"<think><tool_call>{{</think>{CALL}", "<think><tool_call>{</think>"),
        (f"{CALL}<think>{IN_THOUGHT}", f"<think>{IN_THOUGHT}"),
    ],
)
def test_a_call_within_reasoning_is_no_call(text: str, content: str | None) -> None:
    message = answer_message(text, TOOLS, call_number=3)
    called = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    assert called == ([] if content is None else ['{"a": 2}'])
    assert message["content"] == (content or text)


def test_a_call_in_reasoning_that_the_prompt_began_and_a_limit_ended_is_no_call() -> None:
    class Thinking(FakeServices):
        def decode(self, tokens: Tokens) -> str:
            is_prompt = plain(tokens) == plain(self.requests[-1].prompt_tokens[-16:])
            return "assistant\n<think>\n" if is_prompt else IN_THOUGHT

    async def asks(create: Create) -> float:
        message = answer(await create(messages=HI, tools=TOOLS))
        assert (message["content"], message["tool_calls"]) == (IN_THOUGHT, None)
        return 1.0

    run_talk(asks, Thinking())


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        (', "arguments": "{\\"a\\": 1}"', '{"a": 1}'),
        (', "arguments": ""', "{}"),
        (', "arguments": null', "{}"),
        ("", "{}"),
    ],
)
def test_arguments_are_decoded_once_and_may_be_missing(given: str, arguments: str) -> None:
    """In an answer, and in later messages of the agent."""
    text = f'<tool_call>{{"name": "add"{given}}}</tool_call>'
    (call,) = answer_message(text, TOOLS, call_number=3)["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": arguments}
    read = list[Any]()

    class Reading(FakeServices):
        def chat(self, messages: Any, *rest: Any, **after: Any) -> Tokens:
            read.extend(messages)
            return super().chat(messages, *rest, **after)

    async def goes_on(create: Create) -> float:
        function = json.loads(f'{{"name": "add"{given}}}')
        call = {"id": "c", "type": "function", "function": function}
        called = {"role": "assistant", "content": None, "tool_calls": [call]}
        answered = {"role": "tool", "tool_call_id": "c", "content": "2"}
        await create(messages=[*HI, called, answered])
        return 1.0

    run_talk(goes_on, Reading())
    assert read[1]["tool_calls"][0]["function"]["arguments"] == json.loads(arguments)


def logged(
    function: Callable[..., Any], caplog: pytest.LogCaptureFixture, *, num_members: int = 1
) -> tuple[list[str], tuple[str, ...]]:
    """Return the log of a group whose agents fail, and its errors."""
    FAILURES.sum_up()
    caplog.clear()
    group = asyncio.run(run_group(settled(function), episode_of(num_members), FakeServices()))
    return [record.getMessage() for record in caplog.records], group.errors


@pytest.mark.parametrize("is_async", [True, False])
def test_failure_of_an_agent_is_logged_once_with_its_own_frames_and_then_counted(
    is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def inner(base_url: str) -> float:
        return float(base_url)

    def outer(base_url: str) -> float:
        return inner(base_url)

    async def outer_async(base_url: str) -> float:
        return inner(base_url)

    agent = outer_async if is_async else outer
    (once, tenth), errors = logged(agent, caplog, num_members=12)
    frames = [line.rpartition(" in ")[2] for line in once.splitlines() if 'File "' in line]
    assert frames == ["outer_async" if is_async else "outer", "inner"]
    assert tenth.startswith("an episode failed 10 times so far: ValueError in inner, test_agent.py")
    assert len(errors) == 12
    assert "(at inner, test_agent.py, line" in errors[0]


def test_connection_that_fails_is_printed_without_the_frames_of_libraries_that_it_was_raised_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def agent(api_key: str) -> None:
        await talking(asks_once)("http://127.0.0.1:9/v1", api_key)

    (logged_text,), _ = logged(agent, caplog)
    assert len(logged_text.splitlines()) < 35, logged_text
    assert "in agent\n" in logged_text
    assert "ConnectError: All connection attempts failed" in logged_text
    assert "openai.APIConnectionError: Connection error." in logged_text


def test_self_explanatory_error_is_printed_without_our_frames(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (logged_text,), _ = logged(lambda: 1.0, caplog)
    assert "had no answer from its base_url" in logged_text
    assert 'File "' not in logged_text


def test_agent_of_the_page_is_trained_by_its_two_calls() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "workflows.md").read_text()
    (code,) = re.findall(r"^```python\n# my_agents.py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    example: dict[str, Any] = {}
    exec(compile(code, "my_agents.py", "exec"), example)
    question = replace(PROMPT, metadata={"question": "How much?"})
    services = FakeServices()
    (draft,) = run(example["solve"], services, prompt=question, max_calls=2)
    first, second = services.requests
    assert plain(first.prompt_tokens) == plain(services.encode("uHo"))
    assert plain(second.prompt_tokens[-3:]) == plain(services.encode("uAr"))
    assert plain(draft.tokens[: len(second.prompt_tokens)]) == plain(second.prompt_tokens)
    last = draft.output_tokens[len(second.prompt_tokens) - len(draft.prompt_tokens) :]
    assert draft.score.reward == float(PROMPT.answer in services.decode(last))
