"""Makes one request of what several tasks ask for in the same event-loop turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
Result = TypeVar("Result")


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
