"""Agents that run against a policy of scripted answers, by the real client of OpenAI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import openai

from areal_flow.core.types import Prompt, Tokens
from areal_flow.policy.tokenizer.chat import Message
from areal_flow.rollout.workflows.agent import Agent
from areal_flow.rollout.workflows.episode import TrajectoryDraft, contexts_of
from tests.episodes import PROMPT, FakeServices, TextServices, episode_of

Create = Callable[..., Awaitable[Any]]
"""Has the policy complete a chat."""
Talk = Callable[[Create], Awaitable[Any]]


def user_messages(*contents: str) -> list[Any]:
    return [{"role": "user", "content": content} for content in contents]


HI, TOO_LONG = user_messages("hi"), user_messages(*["abc"] * 40)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def answer(completion: Any) -> dict[str, Any]:
    return dict(completion.choices[0].message.model_dump())


def settled(function: Callable[..., Any], **settings: Any) -> Agent:
    globals()["the_agent"] = function
    return Agent(path=f"{__name__}:the_agent", **settings)


def run(
    function: Callable[..., Any],
    services: FakeServices | None = None,
    *,
    prompt: Prompt = PROMPT,
    **settings: Any,
) -> Any:
    """Return the trajectories of one member."""

    async def go() -> list[TrajectoryDraft]:
        (context,) = contexts_of(episode_of(1), services or FakeServices())
        return list(await settled(function, **settings).run(prompt, context))

    return asyncio.run(go())


def talking(talk: Talk) -> Callable[..., Any]:
    """Return an agent that uses the SDK's client."""

    async def agent(base_url: str, api_key: str) -> Any:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            return await talk(partial(client.chat.completions.create, model="m"))

    return agent


def run_talk(talk: Talk, services: FakeServices | None = None, **settings: Any) -> Any:
    return run(talking(talk), services, **settings)


class Scripted(TextServices):
    """A policy that answers with these texts, one after the other; a turn is `[role]content`."""

    def __init__(self, *texts: str) -> None:
        answers = iter(texts)
        super().__init__(lambda _: next(answers), max_model_len=4096, max_new_tokens=256)

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        *,
        after: tuple[int, int] | None = None,
    ) -> Tokens:
        shown = messages if after is None else messages[after[0] + 1 :]
        return self.encode("".join(f"[{each['role']}]{each['content']}" for each in shown))


def trained_text(draft: TrajectoryDraft) -> str:
    """Return what of a trajectory of `Scripted` is trained."""
    return Scripted().decode(draft.output_tokens[draft.loss_mask])
