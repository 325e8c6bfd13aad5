"""What a workflow may do: have the policy complete tokens, have them scored, call a tool.

Members of a group that ask for the same in the same event-loop turn become one request: a prompt
is prefilled once for its group, and a turn's completions are scored in one task.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

from areal_flow.errors import ArealFlowError
from areal_flow.types import Completion, GroupRequest, Prompt, Sampling, Score

Tokens = tuple[int, ...]
Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
Result = TypeVar("Result")


class EpisodeServices(Protocol):
    """What the worker of an episode provides. Fakes of it are a few lines; see the tests."""

    sampling: Sampling
    max_model_len: int
    """How many tokens of context the policy has."""

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        """Complete one sequence of tokens once a seed."""
        ...

    async def score(self, prompt: Prompt, completions: Sequence[Tokens]) -> Sequence[Score]:
        """Score completions of one prompt on a reward worker."""
        ...

    async def call_tool(self, path: str, arguments: tuple[Any, ...]) -> Any:
        """Call the function at an import path on a reward worker."""
        ...

    def encode(self, text: str) -> Tokens: ...

    def decode(self, tokens: Tokens) -> str: ...


class Coalescer(Generic[Key, Item, Result]):
    """Answers items one by one, and has those of one key that came together sent together.

    | who      | waits for             | unblocked by                                        |
    |----------|-----------------------|-----------------------------------------------------|
    | `ask`    | its result            | the request that it became a part of                |
    | requests | the event loop's turn | the next turn; ended when nobody waits for it still |
    """

    def __init__(self, send: Callable[[Key, list[Item]], Awaitable[Sequence[Result]]]) -> None:
        """Take what answers several items of one key, in their order."""
        self._send = send
        self._asked: dict[Key, list[tuple[Item, asyncio.Future[Result]]]] = {}

    async def ask(self, key: Key, item: Item) -> Result:
        """Return the result of one item; what its request raised, if it did."""
        loop = asyncio.get_running_loop()
        if key not in self._asked:
            self._asked[key] = []
            loop.call_soon(self._request, key)
        result: asyncio.Future[Result] = loop.create_future()
        self._asked[key].append((item, result))
        return await result

    def _request(self, key: Key) -> None:
        asked = [(item, result) for item, result in self._asked.pop(key) if not result.done()]
        if not asked:
            return
        results = [result for _, result in asked]
        answer = self._answer(key, [item for item, _ in asked], results)
        request = asyncio.get_running_loop().create_task(answer)
        for result in results:
            result.add_done_callback(
                lambda _: request.cancel() if all(r.done() for r in results) else None
            )

    async def _answer(
        self, key: Key, items: list[Item], waiting: list[asyncio.Future[Result]]
    ) -> None:
        try:
            answers = await self._send(key, items)
            for result, answer in zip(waiting, answers, strict=True):
                if not result.done():
                    result.set_result(answer)
        except Exception as error:  # noqa: BLE001 - whoever asked is told
            for result in waiting:
                if not result.done():
                    result.set_exception(error)
        finally:
            for result in waiting:
                result.cancel()


_REQUEST_NUMBERS = count()
"""An evaluation rolls out the same submission indices as training, maybe at the same time."""


class GroupRequests:
    """The requests of a group's members, made one where they are equal."""

    def __init__(self, name: str, prompt: Prompt, services: EpisodeServices) -> None:
        """Take a name for the requests; their ids are unique in this process all the same."""
        self.services = services
        self._name = name
        self._prompt = prompt
        self.completions = Coalescer(self._generate)
        self.scores = Coalescer(self._score)

    async def _generate(
        self, key: tuple[int, Tokens, int], seeds: list[int]
    ) -> Sequence[Completion]:
        _, tokens, max_new_tokens = key
        sampling = replace(self.services.sampling, max_new_tokens=max_new_tokens)
        request_id = f"{self._name}.{next(_REQUEST_NUMBERS)}"
        return await self.services.generate(
            GroupRequest(request_id, tokens, tuple(seeds), sampling)
        )

    async def _score(self, _: None, completions: list[Tokens]) -> Sequence[Score]:
        return await self.services.score(self._prompt, completions)


class EpisodeContext:
    """What one member's workflow sees of the cluster."""

    def __init__(self, requests: GroupRequests, *, seed: int) -> None:
        self._requests = requests
        self._services = requests.services
        self._seed = seed

    async def generate(self, tokens: Tokens, turn: int, *, branch: int = 0) -> Completion:
        """Return what the policy says after `tokens`.

        Args:
            tokens: prompt and conversation so far, never tokenised again.
            turn: counts the completions of a conversation, from 0. Turn and branch give the seed:
                two completions of a member must differ in one of them.

        Raises:
            ArealFlowError: the context has no room for one token more.
            EngineError: the generator cannot serve: the whole group will be tried again.
        """
        max_new_tokens = min(self._services.sampling.max_new_tokens, self.num_tokens_left(tokens))
        if max_new_tokens < 1:
            raise ArealFlowError(
                f"the conversation has {len(tokens)} tokens, expected fewer than "
                f"generation.max_model_len ({self._services.max_model_len})"
            )
        seed = turn_seed(self._seed, turn, branch)
        return await self._requests.completions.ask((turn, tokens, max_new_tokens), seed)

    async def score(self, completion: Tokens) -> Score:
        """Return what the recipe's rewards say of a completion, judged on a reward worker.

        Raises:
            RewardError: no reward worker could; what a verifier raises is in the score instead.
        """
        return await self._requests.scores.ask(None, completion)

    async def call_tool(self, path: str, *arguments: Any) -> Any:
        """Return what the function `package.module:function` returns on a reward worker.

        Raises:
            ArealFlowError: there is no such function, or what it raised.
        """
        return await self._services.call_tool(path, arguments)

    def num_tokens_left(self, tokens: Tokens) -> int:
        """Return how many more tokens the context has room for."""
        return self._services.max_model_len - len(tokens)

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a text of the environment; special tokens may stand in it."""
        return self._services.encode(text)

    def decode(self, tokens: Tokens) -> str:
        """Return the text of tokens, without special tokens."""
        return self._services.decode(tokens)


def turn_seed(member_seed: int, turn: int, branch: int = 0) -> int:
    """Return the seed of one completion of a member: on any generator, at any attempt the same.

    The first turn of the first branch has the member's own.
    """
    if not turn and not branch:
        return member_seed
    text = f"{member_seed}:{turn}:{branch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
