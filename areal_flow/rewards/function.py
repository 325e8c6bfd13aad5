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
            return await asyncio.gather(*map(self._score_awaited, inputs))
        return await asyncio.to_thread(lambda: [self._score_one(given) for given in inputs])

    def _score_one(self, given: RewardInput) -> Score:
        try:
            return score_of(self.function(**self._arguments(given)))
        except Exception as error:
            logger.exception("the reward function raised")
            return error_score(error)

    async def _score_awaited(self, given: RewardInput) -> Score:
        try:
            return score_of(await self.function(**self._arguments(given)))  # type: ignore[misc]
        except Exception as error:
            logger.exception("the reward function raised")
            return error_score(error)

    def _arguments(self, given: RewardInput) -> dict[str, Any]:
        values = {field.name: getattr(given, field.name) for field in fields(given)}
        named = {name: value for name, value in values.items() if name in self._names}
        columns = {
            name: value
            for name, value in given.metadata.items()
            if name not in values and (self._takes_columns or name in self._names)
        }
        return columns | named


def score_of(returned: Any) -> Score:
    """Return a score as it is, and a bare reward as the score that it stands for.

    Raises:
        ValueError, TypeError: it is neither, or the reward is not finite.
    """
    score = returned
    if not isinstance(score, Score):
        reward = float(returned)
        score = Score(reward, "right" if reward > 0 else "wrong")
    if score.reward is not None and not math.isfinite(score.reward):
        raise ValueError(f"the verifier returned {score.reward}, expected a finite reward")
    return score


def error_score(error: Exception) -> Score:
    """Return the score of a completion whose verifier failed: no reward, and the root cause."""
    return Score(None, "error", error=root_cause(error))
