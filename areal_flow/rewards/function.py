"""A plain function as a `Reward`: each completion is judged alone, and fails alone."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from typing import Any

from areal_flow.errors import root_cause
from areal_flow.rewards.protocol import RewardInput
from areal_flow.types import Score

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., "float | Score | Awaitable[float | Score]"]
"""Takes what it names of `prompt`, `completion`, `answer`, `metadata` and the metadata's columns;
one that takes `**columns` gets all columns."""


class FunctionReward:
    """Calls a function once a completion: in a thread, or on the event loop if it is `async`."""

    def __init__(self, function: RewardFunction) -> None:
        self.function = function
        parameters = inspect.signature(function).parameters.values()
        self._names = {parameter.name for parameter in parameters}
        self._takes_columns = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def open(self) -> None: ...

    def close(self) -> None: ...

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        if inspect.iscoroutinefunction(self.function):
            calls = map(self._awaited, inputs)
            returned = await asyncio.gather(*calls, return_exceptions=True)
        else:
            returned = await asyncio.to_thread(lambda: [*map(self._called, inputs)])
        return [*map(judged, returned)]

    async def _awaited(self, given: RewardInput) -> Any:
        return await self.function(**self._arguments(given))  # type: ignore[misc]

    def _called(self, given: RewardInput) -> Any:
        try:
            return self.function(**self._arguments(given))
        except Exception as error:  # noqa: BLE001 - `judged` does
            return error

    def _arguments(self, given: RewardInput) -> dict[str, Any]:
        own = {field.name: getattr(given, field.name) for field in fields(given)}
        columns = {name: value for name, value in given.metadata.items() if name not in own}
        named = {name: value for name, value in (columns | own).items() if name in self._names}
        return columns | named if self._takes_columns else named


def judged(returned: Any) -> Score:
    """Return the score that a verifier's word stands for; none where it failed, with the cause.

    Args:
        returned: a score, a bare reward, or what the verifier raised.
    """
    try:
        if isinstance(returned, BaseException):
            raise returned
        score = returned
        if not isinstance(score, Score):
            reward = float(returned)
            score = Score(reward, "right" if reward > 0 else "wrong")
        if score.reward is not None and not math.isfinite(score.reward):
            raise ValueError(f"the verifier returned {score.reward}, expected a finite reward")
        return score
    except Exception as error:
        logger.exception("a verifier failed")
        return Score(None, "error", error=root_cause(error))
