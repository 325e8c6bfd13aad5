"""Agents written against the OpenAI SDK, its real client, and the trajectories of their calls."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from areal_flow.errors import EngineError
from areal_flow.types import Completion, GroupRequest, Score, Tokens, as_tokens
from areal_flow.workflows import agent as agent_module
from areal_flow.workflows.agent import Agent
from areal_flow.workflows.agent_session import ContentStream, answer_message
from areal_flow.workflows.context import EpisodeContext, contexts_of
from areal_flow.workflows.group import FAILURES, run_group
from areal_flow.workflows.protocol import TrajectoryDraft
from tests.episodes import LOGITS, PROMPT, FakeServices, episode_of
from tests.fakes import BigramEngine
from tests.plain import plain

Function = Callable[..., Any]


def asked(*contents: str) -> list[Any]:
    return [{"role": "user", "content": content} for content in contents]


def run(function: Function, services: FakeServices | None = None, **settings: Any) -> Any:
    """Return the trajectories of one member."""

    async def go() -> list[TrajectoryDraft]:
        (context,) = contexts_of(episode_of(1), services or FakeServices())
        return list(await running(function, context, **settings))

    return asyncio.run(go())


def running(function: Function, context: EpisodeContext, **settings: Any) -> Awaitable[Any]:
    globals()["the_agent"] = function
    return Agent(path=f"{__name__}:the_agent", **settings).run(PROMPT, context)


def client_of(base_url: str, api_key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


async def test_nothing_is_served_when_no_agent_runs() -> None:
    seen: list[str] = []

    async def agent(base_url: str, api_key: str) -> float:
        seen.append(base_url)
        async with client_of(base_url, api_key) as client:
            await client.chat.completions.create(model="policy", messages=asked("hi"))
        return 1.0

    (context,) = contexts_of(episode_of(1), FakeServices())
    await running(agent, context)
    assert seen[0].startswith("http://127.0.0.1:")
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(f"{seen[0]}/models")


def test_calls_that_go_on_are_one_trajectory_of_what_was_sampled() -> None:
    async def agent(prompt: str, base_url: str, api_key: str) -> float:
        assert prompt == PROMPT.text
        async with client_of(base_url, api_key) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            messages = asked("hi")
            for _ in range(2):
                found = await client.chat.completions.create(model="any", messages=messages)
                assert found.usage
                assert found.usage.completion_tokens == len(
                    (found.choices[0].message.content or "").split()
                )
                messages = [*messages, found.choices[0].message.model_dump(), *asked("and?")]
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
    assert draft.score is not None
    assert (draft.score.reward, draft.score.verdict) == (0.75, None)


def test_rewritten_history_begins_another_trajectory() -> None:
    async def agent(base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client:
            found = await client.chat.completions.create(model="m", messages=asked("hi"))
            said = found.choices[0].message.model_dump()
            for content in (said["content"], "something else"):
                history = [*asked("hi"), {**said, "content": content}, *asked("and?")]
                await client.chat.completions.create(model="m", messages=history)

    drafts = run(agent)
    assert [draft.branch for draft in drafts] == [0, 1]
    assert {draft.score and draft.score.verdict for draft in drafts} == {"no_reward"}
    assert not drafts[0].loss_mask.all()
    assert drafts[1].loss_mask.all()


def test_history_longer_than_the_conversation_goes_on_only_if_its_beginning_is_the_same() -> None:
    async def agent(base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            found = await client.chat.completions.create(model="m", messages=asked("hi"))
            said = found.choices[0].message.model_dump()
            history = [*asked("something else"), said, *asked("and?")]
            await client.chat.completions.create(model="m", messages=history)
        return 1.0

    assert [draft.branch for draft in run(agent)] == [0, 1]


@pytest.mark.parametrize(
    "new", [[], [{"role": "assistant", "content": "I said"}, *asked("and?")]], ids=["none", "own"]
)
def test_only_messages_of_others_go_on_from_an_answer(new: list[Any]) -> None:
    async def agent(base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            found = await client.chat.completions.create(model="m", messages=asked("hi"))
            history = [*asked("hi"), found.choices[0].message.model_dump(), *new]
            await client.chat.completions.create(model="m", messages=history)
        return 1.0

    class Begins(FakeServices):
        def chat(self, *arguments: Any, after: tuple[int, int] | None = None) -> Tokens:
            """Put what begins an answer after the messages, as templates do."""
            begun = super().chat(*arguments, after=after).tolist()
            return as_tokens([*begun, *self.encode("a")])

    drafts = run(agent, Begins())
    assert [draft.branch for draft in drafts] == [0, 1]
    assert all(draft.loss_mask.all() for draft in drafts), "each is a conversation of its own"


def test_template_that_rewrites_answers_begins_another_trajectory() -> None:
    class Forgets(FakeServices):
        def chat(self, *arguments: Any, after: tuple[int, int] | None = None) -> Tokens:
            if after is not None:
                raise ValueError("the chat template rewrites earlier answers")
            return super().chat(*arguments, after=after)

    async def goes_on(base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            found = await client.chat.completions.create(model="m", messages=asked("hi"))
            history = [*asked("hi"), found.choices[0].message.model_dump(), *asked("and?")]
            await client.chat.completions.create(model="m", messages=history)
        return 1.0

    drafts = run(goes_on, Forgets(tokens_per_version=2))
    assert [draft.branch for draft in drafts] == [0, 1]
    assert all(draft.loss_mask.all() for draft in drafts)
    assert len({span.version for draft in drafts for span in draft.version_spans}) > 1


def test_calls_from_one_answer_at_a_time_do_not_share_it() -> None:
    async def agent(base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            found = await client.chat.completions.create(model="m", messages=asked("hi"))
            history = [*asked("hi"), found.choices[0].message.model_dump()]
            together = (
                client.chat.completions.create(model="m", messages=[*history, *asked(content)])
                for content in ("a", "b")
            )
            await asyncio.gather(*together)
        return 0.0

    class Slow(FakeServices):
        async def generate(self, request: GroupRequest) -> Any:
            await asyncio.sleep(0.2)  # both calls come while neither is answered
            return await super().generate(request)

    services = Slow()
    drafts = run(agent, services)
    assert sorted(draft.branch for draft in drafts) == [0, 1]
    seeds = [seed for request in services.requests for seed in request.seeds]
    assert len(set(seeds)) == len(seeds) == 3


def test_call_goes_on_only_with_the_same_tools() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

    async def agent(base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            ask = client.chat.completions.create
            found = await ask(model="m", messages=asked("hi"))
            history = [*asked("hi"), found.choices[0].message.model_dump(), *asked("more")]
            await ask(model="m", messages=history, tools=tools)
        return 0.0

    drafts = run(agent)
    assert [draft.branch for draft in drafts] == [0, 1]
    assert all(draft.loss_mask.all() for draft in drafts), "each is a conversation of its own"


def test_agents_without_async_wait_for_no_thread_and_keep_weights_waiting_for_none() -> None:
    """As many as there are, more than the event loop has threads, wait for each other here."""
    num_agents = 24
    together = threading.Barrier(num_agents, timeout=20)

    def agent(base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            client.chat.completions.create(model="m", messages=asked("hi"))
        together.wait()
        return 1.0

    async def go() -> list[Any]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        contexts = contexts_of(episode_of(num_agents), FakeServices())
        busy = [asyncio.ensure_future(running(agent, c, max_seconds=20)) for c in contexts[1:]]
        await asyncio.sleep(0.5)
        await asyncio.wait_for(asyncio.to_thread(list), 5)  # as an engine loads weights
        return await asyncio.gather(*busy, running(agent, contexts[0], max_seconds=20))

    drafts = [draft for drafts in asyncio.run(go()) for draft in drafts]
    assert len(drafts) == num_agents
    assert {draft.score and draft.score.reward for draft in drafts} == {1.0}


def test_agent_that_hangs_or_exits_ends_no_other() -> None:
    def hangs(base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            client.chat.completions.create(model="m", messages=asked("hi"))
        threading.Event().wait(30)
        return 1.0

    def exits() -> float:
        sys.exit("enough")

    async def exits_too() -> float:
        sys.exit(3)

    (late,) = run(hangs, max_seconds=0.5)
    assert late.finish_reason == "length"
    for agent in (exits, exits_too):
        with pytest.raises(agent_module.ArealFlowError, match=r"the agent called sys\.exit"):
            run(agent)


@pytest.mark.parametrize(
    "reward", [float("nan"), float("inf"), "1", [1.0], pytest.param(10**400, id="huge")]
)
def test_reward_that_is_no_finite_number_is_refused_where_it_is_returned(reward: Any) -> None:
    async def agent(base_url: str, api_key: str) -> Any:
        async with client_of(base_url, api_key) as client:
            await client.chat.completions.create(model="m", messages=asked("hi"))
        return reward

    with pytest.raises(agent_module.ArealFlowError, match="expected a finite number as the reward"):
        run(agent)


def test_object_whose_call_is_async_is_an_agent() -> None:
    class Asks:
        async def __call__(self, base_url: str, api_key: str) -> float:
            async with client_of(base_url, api_key) as client:
                await client.chat.completions.create(model="m", messages=asked("hi"))
            return 0.5

    (draft,) = run(Asks())
    assert draft.score == Score(0.5)


def test_agent_without_async_streams_in_a_thread() -> None:
    def agent(base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            whole = client.chat.completions.create(model="m", messages=asked("hi"))
            usage = {"include_usage": True}
            chunks = [
                *client.chat.completions.create(
                    model="m", messages=asked("hi"), stream=True, stream_options=usage
                )
            ]
        told = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert told
        assert chunks[-1].usage
        assert chunks[-2].choices[0].finish_reason in ("stop", "length")
        assert whole.choices[0].message.role == "assistant"
        return 1.0

    assert len(run(agent)) == 2


class TokenByToken(FakeServices):
    """Samples a token when the agent has seen the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = asyncio.Semaphore(1)

    async def generate(self, request: GroupRequest) -> Any:
        self.requests.append(request)
        engine = BigramEngine(LOGITS, max_num_seqs=64)
        engine.add(request)
        while True:
            await asyncio.wait_for(self.seen.acquire(), 10)
            if finished := engine.step():
                return finished[0][1]


def test_text_is_streamed_as_it_is_sampled_and_the_trajectory_is_the_same() -> None:
    services = TokenByToken()

    async def streams(base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            chunks = await client.chat.completions.create(
                model="m", messages=asked("hi"), stream=True
            )
            pieces = [c.choices[0].delta.content async for c in seen(chunks) if c.choices]
        assert len([piece for piece in pieces if piece]) > 1
        return 1.0

    async def seen(chunks: Any) -> Any:
        async for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                services.seen.release()
            yield chunk

    async def waits(base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            await client.chat.completions.create(model="m", messages=asked("hi"))
        return 1.0

    (streamed,), (whole,) = run(streams, services), run(waits)
    assert plain(streamed) == plain(whole)


def test_stream_that_its_client_leaves_is_cancelled() -> None:
    cancelled = asyncio.Event()

    class Notes(TokenByToken):
        async def generate(self, request: GroupRequest) -> Any:
            try:
                return await super().generate(request)
            except asyncio.CancelledError:
                cancelled.set()
                raise

    services = Notes()

    async def leaves(base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            chunks = await client.chat.completions.create(
                model="m", messages=asked("hi"), stream=True
            )
            await anext(aiter(chunks))
            await chunks.close()
            await asyncio.wait_for(cancelled.wait(), 5)
            services.seen = asyncio.Semaphore(100)
            await client.chat.completions.create(model="m", messages=asked("ho"))
        return 1.0

    (draft,) = run(leaves, services)
    assert draft.loss_mask.all()


def test_stream_never_cuts_a_character_nor_shows_what_is_a_call() -> None:
    text = ' Été 🙂 then\n<tool_call>{"name": "a", "arguments": {}}</tool_call>'

    class Bytes(FakeServices):
        def decode(self, tokens: Any) -> str:
            return bytes(tokens.tolist()).decode(errors="replace")

    (context,) = contexts_of(episode_of(1), Bytes())
    for has_tools, whole in ((False, text), (True, " Été 🙂 then")):
        pieces: list[str] = []
        stream = ContentStream(context, pieces.append, has_tools=has_tools)
        for byte in text.encode():
            stream(byte)
        assert "".join(pieces) == whole
        assert len(pieces) > 5
    tools = [{"type": "function", "function": {"name": "a"}}]
    assert answer_message(text, tools, call_number=0)["content"] == whole


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({"n": 2}, 400, "n = 2 is not served here"),
        ({"stop": ["x"]}, 400, "set generation.stop.strings in the recipe"),
        ({"logprobs": True}, 400, "logprobs"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"messages": []}, 400, "expected messages"),
        ({"messages": [{"role": "refused", "content": "?"}]}, 400, "chat template"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "text"),
        ({"messages": asked(*["abc"] * 40)}, 400, "expected fewer than"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    changes: dict[str, Any], status: int, message: str
) -> None:
    async def agent(base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            call: dict[str, Any] = {"model": "m", "messages": asked("hi")}
            with pytest.raises(openai.APIStatusError, match=message) as refused:
                await client.chat.completions.create(**{**call, **changes})
            assert refused.value.status_code == status
            await client.chat.completions.create(model="m", messages=asked("hi"))
        return 1.0

    assert len(run(agent)) == 1


def test_sampling_is_the_recipes_whatever_a_call_asks_for() -> None:
    async def agent(base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            await client.chat.completions.create(
                model="m", messages=asked("hi"), temperature=0.1, top_p=0.5, seed=3, max_tokens=2
            )
        return 1.0

    services = FakeServices()
    (draft,) = run(agent, services)
    assert services.requests[0].sampling.temperature == services.sampling.temperature
    assert len(draft.output_tokens) <= 2


def test_first_reward_counts_and_strangers_are_refused() -> None:
    statuses: list[int] = []

    async def agent(base_url: str, api_key: str) -> float:
        root = base_url.removesuffix("/v1")
        own = {"Authorization": f"Bearer {api_key}"}
        async with client_of(base_url, api_key) as client, aiohttp.ClientSession() as http:
            await client.chat.completions.create(model="m", messages=asked("hi"))
            posts = (
                (f"{root}/reward", {"reward": "much"}, own),
                (f"{root}/reward", {"reward": float("nan")}, own),
                (f"{root}/reward", {"reward": 10**400}, own),
                (f"{root}/reward", {"reward": 0.25}, own),
                (f"{root}/reward", {"reward": 1.0}, own),
                (f"{root}/reward", {"reward": 1.0}, {"Authorization": "Bearer x"}),
                (f"{root}x/reward", {"reward": 1.0}, own),
            )
            for url, body, headers in posts:
                async with http.post(url, json=body, headers=headers) as response:
                    statuses.append(response.status)
        return 0.5

    (draft,) = run(agent)
    assert statuses == [400, 400, 400, 200, 409, 401, 404]
    assert draft.score is not None
    assert draft.score.reward == 0.25


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

    async def agent(base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model="m", messages=asked("hi"), timeout=0.2)
            await client.chat.completions.create(model="m", messages=asked("hi"))
        return 1.0

    (draft,) = run(agent, Slow())
    assert len(cancelled) == 1
    assert draft.loss_mask.all()


def test_too_many_calls_and_too_long_episodes_are_cut_and_say_so() -> None:
    async def asks_on(base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            for _ in range(2):
                await client.chat.completions.create(model="m", messages=asked("hi"))
            with pytest.raises(openai.RateLimitError, match="max_calls"):
                await client.chat.completions.create(model="m", messages=asked("hi"))
        return 1.0

    async def sleeps(base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            await client.chat.completions.create(model="m", messages=asked("hi"))
            await asyncio.sleep(60)
        return 1.0

    cut = run(asks_on, max_calls=2)
    assert [draft.finish_reason for draft in cut] == ["length"] * 2
    said = {draft.score and draft.score.message for draft in cut}
    assert said == {"ended by workflow.max_calls (2)"}
    (late,) = run(sleeps, max_seconds=0.5)
    assert late.finish_reason == "length"
    assert late.score is not None
    assert late.score.reward is None
    assert "gave no reward before it was ended by workflow.max_seconds (0.5)" in late.score.error
    services = FakeServices()
    (left,) = run(sleeps, services, max_seconds=0.5, missing_reward="score")
    assert left.score is not None
    assert left.score.verdict in ("right", "wrong"), "by the recipe's rewards"
    assert left.score.message == "ended by workflow.max_seconds (0.5)"
    assert [plain(each) for each in services.scored[0]] == [plain(left.output_tokens)]


@pytest.mark.parametrize("handles_it", [True, False])
def test_agent_whose_context_is_full_is_cut_with_the_reason(handles_it: bool) -> None:
    async def agent(base_url: str, api_key: str) -> float:
        history = asked("hi")
        async with client_of(base_url, api_key) as client:
            for _ in range(20):
                try:
                    found = await client.chat.completions.create(model="m", messages=history)
                except openai.BadRequestError as error:
                    if handles_it and error.code == "context_length_exceeded":
                        return 0.25
                    raise
                history += [found.choices[0].message.model_dump(), *asked("more")]
        raise AssertionError("the context was never full")

    (draft,) = run(agent, missing_reward=0.0)
    assert draft.finish_reason == "length"
    assert draft.score is not None
    assert draft.score.reward == (0.25 if handles_it else 0.0)
    assert "generation.max_model_len (64)" in draft.score.message


TOO_LONG = asked(*["abc"] * 40)


@pytest.mark.parametrize("handles_it", [True, False])
def test_agent_whose_first_call_is_over_the_context_fails_with_the_reason(handles_it: bool) -> None:
    async def agent(base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            try:
                await client.chat.completions.create(model="m", messages=TOO_LONG)
            except openai.BadRequestError:
                if not handles_it:
                    raise
        return 0.0

    async def sleeps() -> None:
        await asyncio.sleep(60)

    with pytest.raises(agent_module.ArealFlowError, match=r"ended by .*max_model_len \(64\)"):
        run(agent)
    with pytest.raises(agent_module.ArealFlowError, match=r"ended by workflow\.max_seconds \(0\.2"):
        run(sleeps, max_seconds=0.2)


def test_agent_that_folds_its_history_has_that_conversation_cut_alone() -> None:
    async def folds(base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            found = await client.chat.completions.create(model="m", messages=asked("hi"))
            history = [*asked("hi"), found.choices[0].message.model_dump(), *TOO_LONG]
            with pytest.raises(openai.BadRequestError, match="max_model_len"):
                await client.chat.completions.create(model="m", messages=history)
            await client.chat.completions.create(model="m", messages=asked("in short"))
        return 1.0

    async def asks_shorter(base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            found = await client.chat.completions.create(model="m", messages=asked("hi"))
            history = [*asked("hi"), found.choices[0].message.model_dump()]
            for more in (TOO_LONG, asked("ok")):
                with suppress(openai.BadRequestError):
                    await client.chat.completions.create(model="m", messages=[*history, *more])
        return 1.0

    first, second = run(folds)
    assert first.score == Score(1.0, message=first.score.message)
    assert first.finish_reason == "length"
    assert "max_model_len (64)" in first.score.message
    assert second.score == Score(1.0)
    (whole,) = run(asks_shorter)
    assert whole.score == Score(1.0)


@pytest.mark.parametrize("is_grouped", [True, False])
def test_failure_of_an_agents_own_after_a_limit_is_its_failure(is_grouped: bool) -> None:
    async def asks_once(base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client:
            await client.chat.completions.create(model="m", messages=asked("hi"))

    async def breaks(base_url: str, api_key: str) -> float:
        await asks_once(base_url, api_key)
        with pytest.raises(openai.RateLimitError):
            await asks_once(base_url, api_key)
        raise KeyError("the agent's own")

    async def ends_over_it(base_url: str, api_key: str) -> None:
        await asks_once(base_url, api_key)
        try:
            if is_grouped:
                async with asyncio.TaskGroup() as group:
                    group.create_task(asks_once(base_url, api_key))
            await asks_once(base_url, api_key)
        except Exception as error:
            raise RuntimeError("no answer") from error

    with pytest.raises(KeyError, match="the agent's own"):
        run(breaks, max_calls=1, missing_reward=0.0)
    (cut,) = run(ends_over_it, max_calls=1, missing_reward=0.0)
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
    async def forgets(base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client:
            await client.chat.completions.create(model="m", messages=asked("hi"))

    (draft,) = run(forgets, **settings)
    assert draft.score is not None
    assert (draft.score.reward, draft.score.verdict) == (reward, verdict)
    assert bool(draft.score.error) == (reward is None)
    (left,) = run(forgets, missing_reward="score")
    assert left.score is None


def test_agent_that_fails_or_asks_nothing_fails_its_member() -> None:
    async def fails(base_url: str) -> float:
        raise KeyError("the agent's own")

    async def silent() -> float:
        return 1.0

    with pytest.raises(KeyError, match="the agent's own"):
        run(fails)
    with pytest.raises(agent_module.ArealFlowError, match="had no answer"):
        run(silent)


def test_generator_that_cannot_serve_has_the_group_tried_again() -> None:
    class Broken(FakeServices):
        async def generate(self, request: GroupRequest) -> list[Completion]:
            raise EngineError("out of memory")

    async def agent(base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            await client.chat.completions.create(model="m", messages=asked("hi"))
        return 1.0

    with pytest.raises(EngineError, match="out of memory"):
        run(agent, Broken())


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

    globals()["the_agent"] = outer_async if is_async else outer
    agent = Agent(path=f"{__name__}:the_agent")
    FAILURES.sum_up()
    caplog.clear()
    group = asyncio.run(run_group(agent, episode_of(12), FakeServices()))
    once, tenth = (record.getMessage() for record in caplog.records)
    frames = [line.rpartition(" in ")[2] for line in once.splitlines() if 'File "' in line]
    assert frames == ["outer_async" if is_async else "outer", "inner"]
    assert tenth.startswith("an episode failed 10 times so far: ValueError in inner, test_agent.py")
    assert len(group.errors) == 12
    assert "(at inner, test_agent.py, line" in group.errors[0]


def test_connection_that_fails_is_printed_without_the_frames_of_libraries_that_it_was_raised_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def agent(api_key: str) -> None:
        async with client_of("http://127.0.0.1:9/v1", api_key) as client:
            await client.chat.completions.create(model="m", messages=asked("hi"))

    globals()["the_agent"] = agent
    FAILURES.sum_up()
    caplog.clear()
    asyncio.run(run_group(Agent(path=f"{__name__}:the_agent"), episode_of(1), FakeServices()))
    (said,) = (record.getMessage() for record in caplog.records)
    assert len(said.splitlines()) < 35, said
    assert "in agent\n" in said
    assert "ConnectError: All connection attempts failed" in said
    assert "openai.APIConnectionError: Connection error." in said


def test_error_that_says_all_is_printed_without_our_frames(
    caplog: pytest.LogCaptureFixture,
) -> None:
    globals()["the_agent"] = lambda: 1.0
    FAILURES.sum_up()
    caplog.clear()
    asyncio.run(run_group(Agent(path=f"{__name__}:the_agent"), episode_of(1), FakeServices()))
    (said,) = (record.getMessage() for record in caplog.records)
    assert "had no answer from its base_url" in said
    assert 'File "' not in said


def test_agent_of_the_page_is_trained_by_its_two_calls() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "workflows.md").read_text()
    (code,) = re.findall(r"^```python\n# my_agents.py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    example: dict[str, Any] = {}
    exec(compile(code, "my_agents.py", "exec"), example)
    question = replace(PROMPT, metadata={"question": "How much?"})
    services = FakeServices()
    globals()["the_agent"] = example["solve"]
    agent = Agent(path=f"{__name__}:the_agent", max_calls=2)

    async def go() -> list[TrajectoryDraft]:
        (context,) = contexts_of(episode_of(1), services)
        return list(await agent.run(question, context))

    (draft,) = asyncio.run(go())
    first, second = services.requests
    assert plain(first.prompt_tokens) == plain(services.encode("uHo"))
    assert plain(second.prompt_tokens[-3:]) == plain(services.encode("uAr"))
    assert plain(draft.tokens[: len(second.prompt_tokens)]) == plain(second.prompt_tokens)
    last = draft.output_tokens[len(second.prompt_tokens) - len(draft.prompt_tokens) :]
    assert draft.score is not None
    assert draft.score.reward == float(PROMPT.answer in services.decode(last))
