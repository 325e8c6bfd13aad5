"""What a workflow may do: have the policy complete tokens, have them scored, call a tool.

Members of a group that ask for the same in the same event-loop turn become one request: a prompt
is prefilled once for its group, a turn's completions are scored in one task, and one tool's calls
are made in one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from areal_flow.core.errors import ArealFlowError
from areal_flow.core.types import (
    Completion,
    Episode,
    GroupRequest,
    Prompt,
    Sampling,
    Score,
    Tokens,
    as_tokens,
    counter_seed,
)

Message = Mapping[str, Any]
"""Of a chat: `role`, `content`, an assistant's calls of tools."""

OnToken = Callable[[int], None]
"""Takes each token of a completion as it is sampled."""

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
Result = TypeVar("Result")


class EpisodeServices(Protocol):
    """What the worker of an episode provides. Fakes of it are a few lines; see the tests."""

    sampling: Sampling
    max_model_len: int
    """How many tokens of context the policy has."""
    is_chat: bool
    """Whether turns are put by a chat template."""

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        """Complete one sequence of tokens once a seed."""

    async def score(self, prompt: Prompt, completions: Sequence[Tokens]) -> Sequence[Score]:
        """Score completions of one prompt on a reward worker."""

    async def call_tool(self, path: str, calls: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """Call a function on a reward worker; return what each call returned or raised."""

    def next_turn(self, contents: Sequence[str], ended_by: int, role: str) -> Tokens:
        """Return the tokens of messages of a user or tools after an answer that a token ended."""
        ...

    def chat_calls(self, prompt: Tokens, answer: Tokens) -> Sequence[tuple[str, str]]:
        """Return tool and input of each call in an answer, as the chat template has calls.

        Args:
            prompt: the conversation before the answer, which may have begun its reasoning.
        """
        ...

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        *,
        after: tuple[int, int] | None = None,
    ) -> Tokens:
        """Return the tokens of messages up to where the policy answers, by the chat template.

        Args:
            messages: each with `role` and `content`.
            tools: JSON schemas, which the template shows to the policy.
            after: the place of an answer and the token that ended it, -1 if none did: only what
                follows it is returned.

        Raises:
            ValueError: the template refuses them, or rewrites earlier answers.
        """
        ...

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a text of the environment; special tokens may stand in it."""
        ...

    def decode(self, tokens: Tokens) -> str: ...


class Coalescer(Generic[Key, Item, Result]):
    """Sends the items of one key that come in one turn of the event loop as one request.

    `ask` waits for the request that its item is part of, which is ended when nobody waits for it.
    """

    def __init__(self, send: Callable[[Key, list[Item]], Awaitable[Sequence[Result]]]) -> None:
        self._send = send
        self._open: dict[Key, tuple[dict[object, Item], asyncio.Task[dict[object, Result]]]] = {}

    async def ask(self, key: Key, item: Item) -> Result:
        """Return the result of one item, or raise what its request raised."""
        if key not in self._open:
            batch: dict[object, Item] = {}
            asyncio.get_running_loop().call_soon(self._open.pop, key)
            self._open[key] = batch, asyncio.create_task(self._request(key, batch))
        waiting, request = self._open[key]
        mine = object()
        waiting[mine] = item
        try:
            return (await asyncio.shield(request))[mine]
        finally:
            del waiting[mine]
            if not waiting:
                request.cancel()

    async def _request(self, key: Key, waiting: dict[object, Item]) -> dict[object, Result]:
        pending = dict(waiting)
        return dict(zip(pending, await self._send(key, [*pending.values()]), strict=True))


_REQUEST_NUMBERS = count()
"""An evaluation rolls out the same submission indices as training, maybe at the same time."""


class EpisodeContext:
    """What one member's workflow sees of the cluster."""

    def __init__(
        self,
        services: EpisodeServices,
        completions: Coalescer[tuple[int, bytes, int], tuple[int, OnToken | None], Completion],
        scores: Coalescer[None, Tokens, Score],
        tools: Coalescer[str, tuple[Any, ...], Any],
        seed: int,
    ) -> None:
        self._services = services
        self.sampling, self.is_chat = services.sampling, services.is_chat
        self.chat, self.chat_calls = services.chat, services.chat_calls
        self.encode = services.encode
        self._completions = completions
        self._scores = scores
        self._tools = tools
        self._began = monotonic()
        self.seed = seed
        """This member's own, the same at any attempt."""

    async def generate(
        self,
        tokens: Sequence[int] | Tokens,
        turn: int,
        *,
        branch: int = 0,
        max_new_tokens: int | None = None,
        on_token: OnToken | None = None,
    ) -> Completion:
        """Return what the policy says after `tokens`.

        Args:
            tokens: prompt and conversation so far, never tokenised again.
            turn: counts the completions of a conversation, from 0. Turn and branch give the seed:
                two completions of a member must differ in one of them.
            max_new_tokens: of this completion, at most `generation.max_new_tokens`.
            on_token: called on the event loop with each token as it is sampled.

        Raises:
            ArealFlowError: the context, or `max_new_tokens`, has no room for one token.
            EngineError: the generator cannot serve: the whole group will be tried again.
        """
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ArealFlowError(f"expected max_new_tokens of at least 1, found {max_new_tokens}")
        room = min(self._services.sampling.max_new_tokens, self.num_tokens_left(tokens))
        if room < 1:
            raise ArealFlowError(
                f"the conversation has {len(tokens)} tokens, expected fewer than "
                f"generation.max_model_len ({self._services.max_model_len})"
            )
        seed = turn_seed(self.seed, turn, branch)
        key = (turn, as_tokens(tokens).tobytes(), min(room, max_new_tokens or room))
        return await self._completions.ask(key, (seed, on_token))

    async def score(self, completion: Sequence[int] | Tokens) -> Score:
        """Return what the recipe's rewards say of a completion, judged on a reward worker.

        Raises:
            RewardError: no reward worker could; what a verifier raises is in the score instead.
        """
        return await self._scores.ask(None, as_tokens(completion))

    async def call_tool(self, path: str, *arguments: Any) -> Any:
        """Return what the function `package.module:function` returns on a reward worker.

        Raises:
            ArealFlowError: there is no such function, or what it raised.
        """
        result = await self._tools.ask(path, arguments)
        if isinstance(result, Exception):
            raise result
        return result

    def elapsed_s(self) -> float:
        return monotonic() - self._began

    def num_tokens_left(self, tokens: Sequence[int] | Tokens) -> int:
        """Return how many more tokens the context has room for."""
        return self._services.max_model_len - len(tokens)

    def user_turn(self, content: str, *, after: Sequence[int] | Tokens) -> Tokens:
        """Return the tokens with which the user answers, up to where the policy goes on.

        They are those of the content or, with a chat template, what it makes of the content, and
        are to be appended to `after`, the conversation so far, which ends with a completion.

        Raises:
            ValueError: the chat template rewrites earlier answers.
        """
        return self._services.next_turn([content], int(after[-1]), "user")

    def tool_turn(self, *contents: str, after: Sequence[int] | Tokens) -> Tokens:
        """Return the tokens with which tools answer, a message for each call; see `user_turn`."""
        return self._services.next_turn(contents, int(after[-1]), "tool")

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        """Return text without special tokens."""
        return self._services.decode(as_tokens(tokens))


def contexts_of(episode: Episode, services: EpisodeServices) -> list[EpisodeContext]:
    """Return a context for each member of a group."""

    async def generate(
        key: tuple[int, bytes, int], members: Sequence[tuple[int, OnToken | None]]
    ) -> Sequence[Completion]:
        _, prefix, max_new_tokens = key
        seeds, listeners = zip(*members, strict=True)
        tokens = np.frombuffer(prefix, np.int32)
        changed = {**episode.sampling, "max_new_tokens": max_new_tokens}
        sampling = replace(services.sampling, **changed)
        name = f"{episode.group_id}.{episode.attempt}.{next(_REQUEST_NUMBERS)}"
        on_token = _on_event_loop(listeners) if any(listeners) else None
        return await services.generate(GroupRequest(name, tokens, seeds, sampling, on_token))

    async def score(_: None, completions: Sequence[Tokens]) -> Sequence[Score]:
        return await services.score(episode.prompt, completions)

    shared = Coalescer(generate), Coalescer(score), Coalescer(services.call_tool)
    return [EpisodeContext(services, *shared, seed) for seed in episode.seeds]


def _on_event_loop(listeners: Sequence[OnToken | None]) -> Callable[[int, int], None]:
    """Return what passes tokens from the engine's thread to the listening members."""
    loop = asyncio.get_running_loop()

    def on_token(index: int, token: int) -> None:
        if listener := listeners[index]:
            loop.call_soon_threadsafe(listener, token)

    return on_token


def turn_seed(member_seed: int, turn: int, branch: int = 0) -> int:
    """Return the seed of one completion: the first turn of the first branch has the member's."""
    return counter_seed(member_seed, turn, branch) if turn or branch else member_seed
