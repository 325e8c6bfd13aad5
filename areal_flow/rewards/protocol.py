"""What every reward promises (`tests/contracts/test_rewards.py`), and a function as a reward."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import count
from typing import Any, Protocol

from pydantic import Field

from areal_flow.core.failures import cause_of
from areal_flow.core.settings import Settings
from areal_flow.core.types import Score
from areal_flow.rewards.calls import FAILURES, call_in_thread, call_on_loop


class RewardSettings(Settings):
    """One of the rewards whose weighted sum is the reward of a completion."""

    verifier: str = "numeric"
    """A built-in verifier, an import path `package.module:function`, or a shipped function."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments."""
    weight: float = 1.0
    """Weight in the sum."""
    sources: tuple[str, ...] = Field((), strict=False)
    """The `[[sources]]` whose completions it scores; none: all."""
    timeout_s: float = Field(60.0, gt=0)
    """Time limit per completion for your own verifiers."""


def part_names(rewards: Sequence[RewardSettings]) -> list[str]:
    """Return the name of each part of a sum: its verifier, the second one with a free number."""
    verifiers = [reward.verifier for reward in rewards]
    names: list[str] = []
    for verifier in verifiers:
        numbered = (f"{verifier}_{number}" for number in count(2))
        free = (name for name in numbered if name not in {*verifiers, *names})
        names.append(next(free) if verifier in names else verifier)
    return names


@dataclass(frozen=True, slots=True)
class TrainerState:
    """How far training is: what transformers' `TrainerState` has, with its defaults."""

    global_step: int = 0
    """The newest policy version that sampled a token of the completion."""
    max_steps: int = 1
    """The recipe's `num_steps`."""
    epoch: float = 0.0
    """How often the steps up to then asked each prompt, had they used every group."""
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    log_history: Sequence[Mapping[str, float]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: Mapping[str, Any] | None = None
    stateful_callbacks: Mapping[str, Any] = field(default_factory=dict)


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
        messages: the prompt as the messages of its row; none where the row has text.
        trainer_state: how far training is.
    """

    prompt: str
    completion: str
    answer: Any
    metadata: Mapping[str, Any] = field(default_factory=dict)
    completion_ids: Sequence[int] = ()
    prompt_source: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    trainer_state: TrainerState = TrainerState()


COMPLETION_ARGUMENTS = (
    *("prompt", "completion", "answer", "metadata"),
    *("completion_ids", "prompt_source", "trainer_state"),
)
"""What a function may name of a `RewardInput`, beside columns of the row and its own settings."""


MAX_COMPLETION_CHARS = 2**22


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


NUM_AT_ONCE = 16
"""Completions that an `async` function judges at the same time, and more where a group has more."""


class Reward(Protocol):
    """Judges completions, many at a time. Opened once on each reward worker, and closed there.

    One with an attribute `max_concurrency`, which waits rather than computes, scores several groups
    at once, up to that many completions; any other scores one group after the other.
    """

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
"""Takes what it names of `COMPLETION_ARGUMENTS` and the metadata's columns; with `**columns` all
columns."""


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function, or an object that is called like one, is to be awaited."""
    called: Any = bare(function)
    return any(map(inspect.iscoroutinefunction, (called, called.__call__)))


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function without the arguments that `functools.partial` has bound to it."""
    return bare(function.func) if isinstance(function, partial) else function


class FunctionReward:
    """Calls a function once a completion: in a thread, or on the verifiers' loop if `async`."""

    def __init__(self, function: RewardFunction, *, timeout_s: float = 60.0) -> None:
        self.function: Callable[..., Any] = function
        self.timeout_s = timeout_s
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self._names = {parameter.name for parameter in named}
        self._needs = {
            parameter.name for parameter in named if parameter.default is parameter.empty
        }
        self._takes_columns = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.max_concurrency = NUM_AT_ONCE if is_async(function) else 1

    def open(self) -> None: ...

    def close(self) -> None: ...

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        calls = [partial(self._call, given) for given in inputs]
        if is_async(self.function):
            awaited = (call_on_loop(call, limit_s=self.timeout_s) for call in calls)
            returned = await asyncio.gather(*awaited, return_exceptions=True)
        else:
            returned = await call_in_thread(calls, limit_s=self.timeout_s)
        return [judged(outcome) for outcome in returned]

    def _call(self, given: RewardInput) -> Any:
        own = {name: getattr(given, name) for name in COMPLETION_ARGUMENTS}
        columns = {name: value for name, value in given.metadata.items() if name not in own}
        named = self._named(own | columns)
        return self.function(**(columns | named if self._takes_columns else named))

    def _named(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if missing := sorted(self._needs - given.keys()):
            raise TypeError(
                f"the verifier asks for {', '.join(map(repr, missing))}; it may ask, by name, for "
                f"{', '.join(given)}"
            )
        return {name: value for name, value in given.items() if name in self._names}


class LimitedReward:
    """A `Reward` of a user's, which may take `timeout_s` over each completion of a call."""

    def __init__(self, reward: Reward, *, timeout_s: float) -> None:
        self.open, self.close = reward.open, reward.close
        self.max_concurrency = max_concurrency(reward)
        self._reward, self._timeout_s = reward, timeout_s

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        limit_s = self._timeout_s * max(1, len(inputs))
        scores: Sequence[Score] = await call_on_loop(
            partial(self._reward.score, inputs), limit_s=limit_s
        )
        return scores


def max_concurrency(reward: Reward) -> int:
    """Return how many completions a reward is asked for at the same time, of several groups."""
    return int(getattr(reward, "max_concurrency", 1))


def judged(returned: Any) -> Score:
    """Return the score of what a verifier returned or raised.

    A bare number has no verdict yet: the weighted sum says whether it passes.
    """
    try:
        if isinstance(returned, BaseException):
            raise returned
        return returned if isinstance(returned, Score) else Score(_as_number(returned))
    except Exception as error:  # noqa: BLE001 - counted, and stored with its completion
        FAILURES.note(error)
        return Score(None, "error", error=cause_of(error))


def _as_number(returned: Any) -> float:
    try:
        return float(returned)
    except (TypeError, ValueError):
        message = f"the verifier returned {returned!r:.80}, expected a number or a Score"
        raise TypeError(message) from None
