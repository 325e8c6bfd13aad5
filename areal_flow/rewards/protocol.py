"""What every reward promises, and a plain function as a reward.

`tests/contracts/test_rewards.py` holds each implementation to it.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial, wraps
from typing import Any, Protocol

from pydantic import Field

from areal_flow.rewards.calls import FAILURES, call_in_thread, cause_of
from areal_flow.rewards.verifier_loop import call_on_loop
from areal_flow.settings import Settings
from areal_flow.types import Score


class RewardSettings(Settings):
    """One of the rewards whose weighted sum is the reward of a completion."""

    verifier: str = "numeric"
    """A name of the registry, an import path `package.module:function`, or a shipped function."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of it, beside what it takes of a completion."""
    weight: float = 1.0
    """What this reward is multiplied by in the sum."""
    sources: tuple[str, ...] = Field((), strict=False)
    """The names of the `[[sources]]` whose completions it judges; none: all."""
    timeout_s: float = Field(60.0, gt=0)
    """A verifier of yours that takes longer over one completion hangs, and has failed there; one
    that judges many at a time has this long for each."""


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One completion to be judged.

    Args:
        prompt: the text that the policy was given.
        completion: the text that it produced, without special tokens.
        answer: the right answer as the prompt's row has it: text, a number, a list.
        metadata: the columns of the prompt's row: tests, an entry point, anything.
        completion_ids: the tokens of the completion, special ones included.
        prompt_source: the name of the prompt's source, where a run has several.
    """

    prompt: str
    completion: str
    answer: Any
    metadata: Mapping[str, Any] = field(default_factory=dict)
    completion_ids: Sequence[int] = ()
    prompt_source: str = ""


MAX_COMPLETION_CHARS = 2**22
"""A longer completion is not read: it is worth nothing, and has the verdict `output_limit`."""


def overlong(completion: str) -> Score | None:
    """Return the score of a completion that is too long to be read; None for any other."""
    if len(completion) <= MAX_COMPLETION_CHARS:
        return None
    return Score(0.0, "output_limit", message=f"more than {MAX_COMPLETION_CHARS} characters")


def reads_completion(function: Callable[..., Score]) -> Callable[..., Score]:
    """Have a verifier not read what is too long for it."""

    @wraps(function)
    def verify(*, completion: str, **others: Any) -> Score:
        return overlong(completion) or function(completion=completion, **others)

    return verify


class Reward(Protocol):
    """Judges completions, many at a time. Opened once on each reward worker, and closed there."""

    def open(self) -> None:
        """Acquire what scoring needs: a connection, a model, a sandbox."""

    def close(self) -> None:
        """Give back what `open` acquired."""

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        """Return one score an input, in their order.

        It runs on an event loop that others use: computations belong into `asyncio.to_thread`.

        Raises:
            Exception: counted and stored as an error of every input; none of them gets a reward.
        """


RewardFunction = Callable[..., "float | Score | Awaitable[float | Score]"]
"""Takes what it names of `prompt`, `completion`, `answer`, `metadata` and the metadata's columns;
one that takes `**columns` gets all columns."""


class FunctionReward:
    """Calls a function once a completion: in a thread, or on a loop of its own if it is `async`.

    Each completion is judged alone, and fails alone.
    """

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
        calls = [partial(self.function, **self._arguments(given)) for given in inputs]
        if inspect.iscoroutinefunction(self.function):
            awaited = (call_on_loop(call, limit_s=self.timeout_s) for call in calls)
            returned = await asyncio.gather(*awaited, return_exceptions=True)
        else:
            returned = await call_in_thread(calls, limit_s=self.timeout_s)
        return [judged(outcome) for outcome in returned]

    def _arguments(self, given: RewardInput) -> dict[str, Any]:
        own = {field.name: getattr(given, field.name) for field in fields(given)}
        columns = {name: value for name, value in given.metadata.items() if name not in own}
        named = {name: value for name, value in (columns | own).items() if name in self._names}
        return columns | named if self._takes_columns else named


class LimitedReward:
    """A `Reward` of a user's, which may take `timeout_s` over each completion of a call."""

    def __init__(self, reward: Reward, *, timeout_s: float) -> None:
        """Take what it does, but where and how long."""
        self.open, self.close = reward.open, reward.close
        self._reward, self._timeout_s = reward, timeout_s

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        limit_s = self._timeout_s * max(1, len(inputs))
        found: Sequence[Score] = await call_on_loop(
            partial(self._reward.score, inputs), limit_s=limit_s
        )
        return found


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
            score = Score(_as_number(returned))
        if score.reward is not None and not math.isfinite(score.reward):
            raise ValueError(f"the verifier returned {score.reward}, expected a finite reward")
        return score
    except Exception as error:  # noqa: BLE001 - counted, and stored with its completion
        FAILURES.note(error)
        return Score(None, "error", error=cause_of(error))


def _as_number(returned: Any) -> float:
    try:
        return float(returned)
    except (TypeError, ValueError):
        raise TypeError(
            f"the verifier returned {returned!r:.80}, expected a number or a Score"
        ) from None
