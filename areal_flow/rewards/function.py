"""A plain function as a `Reward`: each completion is judged alone, and fails alone."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from typing import Any

from areal_flow.rewards.calls import FAILURES, call_in_thread, call_on_loop, cause_of
from areal_flow.rewards.protocol import RewardInput
from areal_flow.types import Score

RewardFunction = Callable[..., "float | Score | Awaitable[float | Score]"]
"""Takes what it names of `prompt`, `completion`, `answer`, `metadata` and the metadata's columns;
one that takes `**columns` gets all columns."""


class FunctionReward:
    """Calls a function once a completion: in a thread, or on the event loop if it is `async`."""

    def __init__(self, function: RewardFunction, *, timeout_s: float = 60.0) -> None:
        """Take a function, and how long it may take over one completion."""
        self.function: Callable[..., Any] = function
        self.timeout_s = timeout_s
        parameters = inspect.signature(function).parameters.values()
        self._names = {parameter.name for parameter in parameters}
        self._takes_columns = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def open(self) -> None: ...

    def close(self) -> None: ...

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        if inspect.iscoroutinefunction(self.function):
            return await asyncio.gather(*map(self._score_one, inputs))
        return [await self._score_one(given) for given in inputs]

    async def _score_one(self, given: RewardInput) -> Score:
        arguments = self._arguments(given)
        call = call_on_loop if inspect.iscoroutinefunction(self.function) else call_in_thread
        try:
            return score_of(await call(lambda: self.function(**arguments), limit_s=self.timeout_s))
        except Exception as error:  # noqa: BLE001 - counted, and stored with its completion
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
        try:
            reward = float(returned)
        except (TypeError, ValueError):
            raise TypeError(
                f"the verifier returned {returned!r:.80}, expected a number or a Score"
            ) from None
        score = Score(reward, "right" if reward > 0 else "wrong")
    if score.reward is not None and not math.isfinite(score.reward):
        raise ValueError(f"the verifier returned {score.reward}, expected a finite reward")
    return score


def error_score(error: Exception) -> Score:
    """Return the score of a completion whose verifier failed: no reward, and the root cause."""
    FAILURES.note(error)
    return Score(None, "error", error=cause_of(error))
