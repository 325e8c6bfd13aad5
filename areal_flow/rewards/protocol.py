"""What every reward promises, and a plain function as a reward.

`tests/contracts/test_rewards.py` holds each implementation to it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from areal_flow.errors import root_cause
from areal_flow.settings import Settings
from areal_flow.types import Score

logger = logging.getLogger(__name__)


class RewardSettings(Settings):
    """One of the rewards whose weighted sum is the reward of a completion."""

    verifier: str = "numeric"
    """A name of the registry, an import path `package.module:function`, or a shipped function."""
    weight: float = 1.0
    """What this reward is multiplied by in the sum."""


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One completion to be judged.

    Args:
        prompt: the text that the policy was given.
        completion: the text that it produced, without special tokens.
        answer: the right answer.
        metadata: the other columns of the prompt's row: tests, an entry point, anything.
    """

    prompt: str
    completion: str
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Reward(Protocol):
    """Judges completions, many at a time. Opened once on each reward worker, and closed there."""

    def open(self) -> None:
        """Acquire what scoring needs: a connection, a model, a sandbox."""
        ...

    def close(self) -> None:
        """Give back what `open` acquired."""
        ...

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        """Return one score an input, in their order.

        It runs on the worker's event loop: computations belong into `asyncio.to_thread`.

        Raises:
            Exception: counted and stored as an error of every input; none of them gets a reward.
        """
        ...


RewardFunction = Callable[..., "float | Score | Awaitable[float | Score]"]
"""Takes what it names of `prompt`, `completion`, `answer`, `metadata` and the metadata's columns;
one that takes `**columns` gets all columns."""


class FunctionReward:
    """Calls a function once a completion: in a thread, or on the event loop if it is `async`.

    Each completion is judged alone, and fails alone.
    """

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

    A bare number has no verdict yet: whether it passes is for the weighted sum to say.

    Args:
        returned: a score, a bare reward, or what the verifier raised.
    """
    try:
        if isinstance(returned, BaseException):
            raise returned
        score = returned
        if not isinstance(score, Score):
            score = Score(float(returned))
        if score.reward is not None and not math.isfinite(score.reward):
            raise ValueError(f"the verifier returned {score.reward}, expected a finite reward")
        return score
    except Exception as error:
        logger.exception("a verifier failed")
        return Score(None, "error", error=root_cause(error))
