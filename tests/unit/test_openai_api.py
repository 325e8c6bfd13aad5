"""OpenAI's APIs, driven by its real client: what a call gets, and what of it is trained."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest

from areal_flow.rollout.workflows.agent_messages import ContentStream, before_stop
from areal_flow.rollout.workflows.episode import TrajectoryDraft
from tests.agents import (
    HI,
    TOOLS,
    Create,
    Scripted,
    answer,
    run,
    run_talk,
    trained_text,
    user_messages,
)
from tests.episodes import FakeServices
from tests.plain import plain

Use = Callable[[openai.AsyncOpenAI], Awaitable[Any]]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
FLAT_TOOL: Any = {"type": "function", "name": "add", "parameters": {}, "strict": True}


def run_client(
    use: Use, services: FakeServices | None = None, **settings: Any
) -> list[TrajectoryDraft]:
    """Return the trajectories of an agent that uses the client, with the reward 1."""

    async def agent(base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            await use(client)
        return 1.0

    drafts: list[TrajectoryDraft] = run(agent, services, **settings)
    return drafts


def texts_of(drafts: Sequence[TrajectoryDraft]) -> list[str]:
    """Return the whole text of each trajectory."""
    return [Scripted().decode(draft.tokens) for draft in drafts]


def test_answer_ends_before_a_stop_string_which_stays_in_the_trajectory() -> None:
    async def goes_on(create: Create) -> float:
        completion = await create(messages=HI, stop="END")
        assert completion.choices[0].finish_reason == "stop"
        assert answer(completion)["content"] == "one "
        history = [*HI, answer(completion), *user_messages("and?")]
        assert answer(await create(messages=history, stop=[".", "\n"]))["content"] == "two"
        return 1.0

    services = Scripted("one END and more", "two. three")
    services.sampling = replace(services.sampling, stop_strings=("</s>",))
    (draft,) = run_talk(goes_on, services)
    first, second = services.requests
    assert first.sampling.stop_strings == ("</s>", "END")
    assert second.sampling.stop_strings == ("</s>", ".", "\n")
    assert texts_of([draft]) == ["[user]hione END[user]and?two."]
    assert trained_text(draft) == "one ENDtwo."


def test_token_before_a_stop_string_is_not_mistaken_for_the_end_of_the_turn() -> None:
    """An answer that ends at a stop string lacks the mark that ends its turn."""
    ends = list[int]()

    class Noting(Scripted):
        def chat(self, *given: Any, after: tuple[int, int] | None = None) -> Any:
            ends.extend([after[1]] if after else [])
            return super().chat(*given, after=after)

    async def goes_on(create: Create) -> float:
        history = HI
        for stop in ("<", None, None):
            completion = await create(messages=history, stop=stop)
            history = [*history, answer(completion), *user_messages("and?")]
        return 1.0

    run_talk(goes_on, Noting("a<", "b", "c"))
    assert ends == [-1, 0]


def test_stream_shows_nothing_from_a_stop_string_on() -> None:
    text = "one EN two END"

    async def streams(create: Create) -> float:
        chunks = [chunk async for chunk in await create(messages=HI, stop="END", stream=True)]
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(pieces) == "one EN two "
        assert len(pieces) > 5
        return 1.0

    run_talk(streams, Scripted(text))
    for stop in (("END",), ("two END", "N"), ("absent",), ()):
        pieces = list[str]()
        stream = ContentStream(Scripted().decode, pieces.append, has_tools=False, stop=stop)
        for byte in text.encode():
            stream(byte)
        assert before_stop(text, stop).startswith("".join(pieces))
        assert ("N" in stop) == ("".join(pieces) == "one E")


def test_each_choice_is_a_branch_that_can_be_continued() -> None:
    async def goes_on(create: Create) -> float:
        completion = await create(messages=HI, n=3)
        assert [choice.index for choice in completion.choices] == [0, 1, 2]
        assert completion.usage.completion_tokens == 3 * len("one-")
        for choice in completion.choices[1:]:
            message = choice.message.model_dump()
            await create(messages=[*HI, message, *user_messages("and?")])
        return 1.0

    services = Scripted("one", "two", "six", "more", "less")
    drafts = run_talk(goes_on, services)
    assert [draft.branch for draft in drafts] == [0, 1, 2]
    assert texts_of(drafts) == [
        "[user]hione",
        "[user]hitwo[user]and?more",
        "[user]hisix[user]and?less",
    ]
    assert [trained_text(draft) for draft in drafts] == ["one", "twomore", "sixless"]
    assert len(services.requests[0].seeds) == 3, "the prompt is prefilled once"
    seeds = [seed for request in services.requests for seed in request.seeds]
    assert len(set(seeds)) == len(seeds) == 5


def test_choices_of_a_continued_conversation_train_its_earlier_answers_once() -> None:
    async def goes_on(create: Create) -> float:
        history = [*HI, answer(await create(messages=HI)), *user_messages("and?")]
        completion = await create(messages=history, n=2, tools=())
        last = completion.choices[1].message.model_dump()
        await create(messages=[*history, last, *user_messages("why?")])
        return 1.0

    drafts = run_talk(goes_on, Scripted("one", "two", "six", "end"))
    assert texts_of(drafts) == ["[user]hione[user]and?two", "[user]hione[user]and?six[user]why?end"]
    assert [trained_text(draft) for draft in drafts] == ["onetwo", "sixend"]


def test_choices_without_room_leave_no_trajectory() -> None:
    async def asks_too_much(create: Create) -> float:
        history = [*HI, answer(await create(messages=HI)), *user_messages("x" * 50)]
        with pytest.raises(openai.BadRequestError, match="max_model_len"):
            await create(messages=history, n=2)
        return 1.0

    services = Scripted("one")
    services.max_model_len = 40
    (draft,) = run_talk(asks_too_much, services)
    assert draft.finish_reason == "length"


def test_each_choice_counts_as_a_call() -> None:
    async def asks_for_many(create: Create) -> float:
        await create(messages=HI, n=3)
        with pytest.raises(openai.RateLimitError, match=r"max_calls \(4\)"):
            await create(messages=HI, n=2)
        return 1.0

    assert len(run_talk(asks_for_many, Scripted(*"abc"), max_calls=4)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_trajectory(stream: bool) -> None:
    logprobs = list[Any]()

    async def asks(create: Create) -> float:
        given = await create(messages=HI, logprobs=True, top_logprobs=0, stop="Z", stream=stream)
        parts = [chunk async for chunk in given] if stream else [given]
        logprobs.extend(
            part.choices[0].logprobs.content for part in parts if part.choices[0].logprobs
        )
        return 1.0

    (draft,) = run_talk(asks, Scripted("été 🙂 Z"))
    (content,) = logprobs
    assert [token.logprob for token in content] == draft.behavior_logprobs.tolist()
    assert "".join(token.token for token in content) == "été 🙂 Z"
    assert b"".join(bytes(token.bytes) for token in content) == "été 🙂 Z".encode()
    assert {len(token.top_logprobs) for token in content} == {0}


def test_prompt_that_continues_a_completion_extends_its_trajectory() -> None:
    """As of an agent that appends what it observes after the stop string."""

    async def reacts(client: openai.AsyncOpenAI) -> None:
        prompt = "Question: 1 + 1\n"
        for observed in ("2\n", ""):
            completion = await client.completions.create(
                model="m", prompt=prompt, stop="Observation:", max_tokens=40
            )
            assert completion.choices[0].finish_reason == "stop"
            prompt += f"{completion.choices[0].text}Observation: {observed}"
        assert prompt == "Question: 1 + 1\nadd Observation: 2\nDone.Observation: "

    services = Scripted("add Observation: and on", "Done.")
    (draft,) = run_client(reacts, services)
    assert texts_of([draft]) == ["Question: 1 + 1\nadd Observation: 2\nDone."]
    assert trained_text(draft) == "add Observation:Done."
    assert plain(services.requests[1].prompt_tokens) == plain(
        services.encode("Question: 1 + 1\nadd Observation: 2\n")
    )


def test_sampled_tokens_of_a_completion_are_never_tokenised_again() -> None:
    class Merging(Scripted):
        """Would tokenise two letters as one."""

        def encode(self, text: str) -> Any:
            return super().encode(text.replace("ab", "c"))

    async def goes_on(client: openai.AsyncOpenAI) -> None:
        cut = await client.completions.create(model="m", prompt="x", max_tokens=2)
        assert (cut.choices[0].text, cut.choices[0].finish_reason) == ("ab", "length")
        await client.completions.create(model="m", prompt="xab")
        await client.completions.create(model="m", prompt="xabd-")
        await client.completions.create(model="m", prompt=["other"])

    drafts = run_client(goes_on, Merging("abz", "d", "!", "?"))
    assert texts_of(drafts) == ["xabd-!", "other?"]


def test_tokens_are_completed_and_continued() -> None:
    async def asks(client: openai.AsyncOpenAI) -> None:
        first = [*b"ab"]
        await client.completions.create(model="m", prompt=first)
        await client.completions.create(model="m", prompt=[*first, *b"one\0", *b"cd"])
        await client.completions.create(model="m", prompt=[*first, *b"two\0", *b"cd"])
        for unknown in ([256], [*first, *b"two\0cdsix\0", 256]):
            with pytest.raises(openai.BadRequestError, match="expected tokens below 256, found"):
                await client.completions.create(model="m", prompt=unknown)

    drafts = run_client(asks, Scripted("one", "two", "six"))
    assert texts_of(drafts) == ["abonecdtwo", "abtwocdsix"]


def test_of_two_choices_the_longer_one_that_a_prompt_continues_is_extended() -> None:
    async def goes_on(client: openai.AsyncOpenAI) -> None:
        choices = await client.completions.create(model="m", prompt="x", n=2, logprobs=0)
        longer, shorter = choices.choices
        assert longer.logprobs
        assert longer.logprobs.tokens == ["1", "2", ""]
        assert longer.logprobs.text_offset == [0, 1, 2]
        assert longer.logprobs.token_logprobs == [-1, -2, -3]
        await client.completions.create(model="m", prompt=f"x{longer.text}?")
        await client.completions.create(model="m", prompt=f"x{shorter.text}!")

    assert texts_of(run_client(goes_on, Scripted("12", "1", "a", "b"))) == ["x12?a", "x1!b"]


async def collected(stream: Any) -> list[Any]:
    return [event async for event in await stream]


def test_completions_are_streamed() -> None:
    async def streams(client: openai.AsyncOpenAI) -> None:
        create = client.completions.create
        chunks = await collected(
            create(model="m", prompt="x", stream=True, stream_options={"include_usage": True})
        )
        pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
        assert pieces == [*"words", ""]
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == 6

    run_client(streams, Scripted("words"))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"prompt": ["a", "b"]}, "expected one prompt"),
        ({"prompt": ""}, "expected one prompt"),
        ({"prompt": "a", "echo": True}, "unsupported echo True"),
        ({"prompt": "a", "logprobs": 2}, "unsupported logprobs 2: only sampled tokens"),
        ({"prompt": "a", "best_of": 2}, "unsupported best_of 2: use n"),
        ({"prompt": "a", "suffix": "b"}, "unsupported suffix"),
    ],
)
def test_completion_that_cannot_be_served_is_refused_with_the_reason(
    parameters: dict[str, Any], message: str
) -> None:
    async def asks(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=message):
            await client.completions.create(model="m", **parameters)
        await client.completions.create(model="m", prompt="a")

    assert len(run_client(asks, Scripted("b"))) == 1


def test_model_is_listed_and_found_by_its_name() -> None:
    async def looks(client: openai.AsyncOpenAI) -> None:
        assert (await client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt")
        await client.completions.create(model="policy", prompt="a")

    run_client(looks, Scripted("b"))


@pytest.mark.parametrize("keeps_history", [True, False])
def test_responses_with_tools_are_one_trajectory_that_logs_their_calls(keeps_history: bool) -> None:
    async def uses_a_tool(client: openai.AsyncOpenAI) -> None:
        common: Any = {
            "model": "m",
            "tools": [FLAT_TOOL],
            "instructions": "Be brief.",
            "store": True,
        }
        history: list[Any] = [{"role": "user", "content": "2 + 2"}]
        first = await client.responses.create(input=history, **common)
        assert [item.type for item in first.output] == ["message", "function_call"]
        assert first.output_text == "So"
        call: Any = first.output[1]
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
        if keeps_history:
            history = [*history, *(item.model_dump() for item in first.output), result]
            second = await client.responses.create(input=history, **common)
        else:
            second = await client.responses.create(
                input=[result], previous_response_id=first.id, **common
            )
        assert (second.output_text, second.status) == ("It is 4", "completed")
        assert second.usage
        assert second.usage.output_tokens == len("It is 4-")

    (draft,) = run_client(uses_a_tool, Scripted(f"So {CALL}", "It is 4"))
    assert texts_of([draft]) == [f"[system]Be brief.[user]2 + 2So {CALL}[tool]4It is 4"]
    assert trained_text(draft) == f"So {CALL}It is 4"
    (record,) = draft.tool_calls
    assert record[:5] == (0, "add", '{"a": 2}', "4", None)
    assert 0 < record.duration_s < 10


def test_a_response_continues_a_chat() -> None:
    async def uses_both(client: openai.AsyncOpenAI) -> None:
        chat = await client.chat.completions.create(model="m", messages=HI)
        answer = chat.choices[0].message.content
        history: list[Any] = [*HI, {"role": "assistant", "content": answer}, *user_messages("so")]
        await client.responses.create(model="m", input=history)

    (draft,) = run_client(uses_both, Scripted("one", "two"))
    assert trained_text(draft) == "onetwo"


def test_calls_of_tools_in_a_chat_are_logged() -> None:
    async def uses_tools(create: Create) -> float:
        history = HI
        for results in (["4", [{"type": "text", "text": "five"}]], ["6"], []):
            message = answer(await create(messages=history, tools=TOOLS))
            calls = [call["id"] for call in message["tool_calls"] or ()]
            messages = [
                {"role": "tool", "tool_call_id": name, "content": result}
                for name, result in zip(calls, results, strict=True)
            ]
            history = [*history, message, *messages]
        return 1.0

    surrogate = CALL.replace("2", r'"\ud800"')
    (draft,) = run_talk(uses_tools, Scripted(CALL + CALL, surrogate, "done"))
    assert [record[:5] for record in draft.tool_calls] == [
        (0, "add", '{"a": 2}', "4", None),
        (0, "add", '{"a": 2}', "five", None),
        (1, "add", '{"a": "?"}', "6", None),
    ]


def test_events_of_a_response_are_streamed() -> None:
    async def streams(client: openai.AsyncOpenAI) -> None:
        given: Any = {"model": "m", "input": "2 + 2", "tools": [FLAT_TOOL]}
        events = await collected(client.responses.create(**given, stream=True))
        kinds = [event.type.removeprefix("response.") for event in events]
        assert [kind for kind in kinds if kind != "output_text.delta"] == [
            *("created", "output_item.added", "content_part.added", "output_text.done"),
            *("content_part.done", "output_item.done"),
            *("output_item.added", "function_call_arguments.delta"),
            *("function_call_arguments.done", "output_item.done", "completed"),
        ]
        assert kinds.count("output_text.delta") > 1
        assert [event.sequence_number for event in events] == [*range(len(events))]
        async with client.responses.stream(**given) as stream:
            await stream.until_done()
            final = await stream.get_final_response()
        assert final.output_text == "So then"
        assert [item.type for item in final.output] == ["message", "function_call"]
        async with client.responses.stream(**given) as stream:
            called = await stream.get_final_response()
        assert [item.type for item in called.output] == ["function_call"]
        cut = await collected(
            client.responses.create(model="m", input="hi", max_output_tokens=1, stream=True)
        )
        assert cut[-1].type == "response.incomplete"
        assert cut[-1].response.incomplete_details.reason == "max_output_tokens"

    run_client(streams, Scripted(f"So then {CALL}", f"So then {CALL}", CALL, "cut"))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"previous_response_id": "resp_x"}, "this session has no response 'resp_x'"),
        ({"tools": [{"type": "web_search"}]}, "unsupported tool"),
        (
            {"input": [{"type": "reasoning", "id": "r", "summary": []}]},
            "unsupported item of input .*: expected a message",
        ),
        ({"input": []}, "expected input"),
        ({"text": {"format": {"type": "json_object"}}}, "bias the trainer's importance weights"),
        ({"reasoning": {"effort": "low"}}, "unsupported reasoning"),
        ({"background": True}, "unsupported background"),
        ({"conversation": "c"}, "unsupported conversation"),
        ({"tool_choice": "required"}, "use 'auto' or 'none'"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_response_that_cannot_be_served_is_refused_with_the_reason(
    parameters: dict[str, Any], message: str
) -> None:
    async def asks(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=message):
            await client.responses.create(**{"model": "m", "input": "hi", **parameters})
        await client.responses.create(model="m", input="hi")

    assert len(run_client(asks, Scripted("b"))) == 1


def test_client_without_async_uses_all_three_apis() -> None:
    def agent(base_url: str, api_key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            chat = client.chat.completions.create(model="m", messages=HI, n=2, stop="!")
            assert [choice.message.content for choice in chat.choices] == ["a", "b"]
            assert client.completions.create(model="m", prompt="x").choices[0].text == "c"
            assert client.responses.create(model="m", input="hi").output_text == "d"
            with client.responses.stream(model="m", input="hi") as stream:
                assert stream.get_final_response().output_text == "e"
        return 1.0

    assert len(run(agent, Scripted("a!", "b!", *"cde"))) == 5
