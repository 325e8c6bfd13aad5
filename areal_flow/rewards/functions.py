"""Functions as rewards: called for one completion or, with TRL's signature, for many.

    def f(completion, answer, **columns) -> float | Score
    def f(prompts, completions, **columns) -> list[float]
    def f(data_source, solution_str, ground_truth, extra_info=None) -> float | dict

The last one is verl's: `solution_str` is the completion, `ground_truth` the reference answer unless
the row has such a column, and the other two are columns. A dict has the reward as `score`, and
other values to be stored with it.

As in TRL 1.16, a function of many may also name `completion_ids`, `trainer_state`, `log_extra`,
`log_metric` and single columns, and a None in its list gives that completion no reward. Prompts and
completions are text, or lists of messages if the prompts' rows have messages.

A function may raise or hang: each call has a time limit. A plain function runs in a thread, an
`async` one on the event loop of all verifiers, which has a thread of its own and is abandoned with
a call that blocks it.

| who             | waits for            | unblocked by                                           |
|-----------------|----------------------|--------------------------------------------------------|
| a call          | its verifier         | the verifier, its time limit, or the end of the loop   |
| the loop's turn | the step of one task | its end; never for longer than that call's time limit  |
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from areal_flow.core.errors import RewardError, place, users_frames
from areal_flow.core.failures import FailureCounts, cause_of, in_own_thread
from areal_flow.core.types import RewardPart, Score
from areal_flow.rewards.protocol import (
    COMPLETION_ARGUMENTS,
    Reward,
    RewardFunction,
    RewardInput,
    max_concurrency,
)

BATCH_ARGUMENTS = (
    *("prompts", "completions", "completion_ids", "answer"),
    *("trainer_state", "log_extra", "log_metric"),
)
"""What a function of many completions may name besides columns of the rows and its own settings."""
VERL_COMPLETION = "solution_str"
"""The parameter that marks a function with verl's signature."""
NUM_AT_ONCE = 16
"""Completions of several groups that an `async` function judges at the same time."""
CHECKS_PER_LIMIT = 4
"""How often a call checks within its time limit whether the loop is blocked."""
FAILURES = FailureCounts("a verifier")
"""Of the verifiers of this process."""


def function_reward(function: RewardFunction, *, timeout_s: float) -> Reward:
    kind = BatchedFunctionReward if is_batched(function) else FunctionReward
    return kind(function, timeout_s=timeout_s)


def is_batched(function: Callable[..., Any]) -> bool:
    """Return whether a function has TRL's signature.

    It names `completions` and no `completion`; or neither of them and no `prompt`, but `prompts`
    or `**columns`. A function with verl's signature judges one completion.
    """
    parameters = inspect.signature(function).parameters
    if VERL_COMPLETION in parameters:
        return False
    if "completion" in parameters or "completions" in parameters:
        return "completion" not in parameters
    takes_columns = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "prompt" not in parameters and (takes_columns or "prompts" in parameters)


def requires_answer(function: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter for the reference answer that has no default."""
    parameters = inspect.signature(function).parameters
    name = "ground_truth" if VERL_COMPLETION in parameters else "answer"
    return name in parameters and parameters[name].default is inspect.Parameter.empty


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling a function, or a callable object, returns an awaitable."""
    callee: Any = without_partial(function)
    return any(map(inspect.iscoroutinefunction, (callee, callee.__call__)))


def without_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function without the arguments that `functools.partial` has bound to it."""
    return without_partial(function.func) if isinstance(function, partial) else function


class FunctionReward:
    """Calls a function once per completion."""

    def __init__(self, function: RewardFunction, *, timeout_s: float = 60.0) -> None:
        self.function: Callable[..., Any] = function
        self.timeout_s = timeout_s
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self._names = {parameter.name for parameter in named}
        self._required = {
            parameter.name for parameter in named if parameter.default is parameter.empty
        }
        self._takes_columns = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.max_concurrency = NUM_AT_ONCE if is_async(function) else 1

    def open(self) -> None: ...

    def close(self) -> None: ...

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        calls = [partial(self._call, item) for item in inputs]
        if is_async(self.function):
            awaited = (call_on_loop(call, limit_s=self.timeout_s) for call in calls)
            results = await asyncio.gather(*awaited, return_exceptions=True)
        else:
            results = await call_in_thread(calls, limit_s=self.timeout_s)
        return [as_score(result) for result in results]

    def _call(self, item: RewardInput) -> Any:
        own = {name: getattr(item, name) for name in COMPLETION_ARGUMENTS}
        columns = {name: value for name, value in item.metadata.items() if name not in own}
        if VERL_COMPLETION in self._names:
            verl = {"data_source": item.prompt_source, "extra_info": {}}
            columns = {**verl, "ground_truth": item.answer, **columns}
            columns[VERL_COMPLETION] = item.completion
        named = self._named(own | columns)
        return self.function(**(columns | named if self._takes_columns else named))

    def _named(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that the function names."""
        if missing := sorted(self._required - available.keys()):
            raise TypeError(
                f"the verifier asks for {', '.join(map(repr, missing))}; it may ask, by name, for "
                f"{', '.join(available)}"
            )
        return {name: value for name, value in available.items() if name in self._names}


class BatchedFunctionReward(FunctionReward):
    """Calls a function once for many completions; if it fails, it has failed on all of them."""

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        if not inputs:
            return []
        logged = _Logged(len(inputs))
        call = partial(self._call_batch, inputs, logged)
        limit_s = self.timeout_s * len(inputs)
        try:
            if is_async(self.function):
                result = await call_on_loop(call, limit_s=limit_s)
            else:
                (result,) = await call_in_thread([call], limit_s=limit_s)
            rewards = _as_list(result, len(inputs))
        except Exception as error:  # noqa: BLE001 - `as_score` counts it
            return [as_score(error)] * len(inputs)
        scores = (Score(None, "no_reward") if r is None else as_score(r) for r in rewards)
        return [logged.add_to(score, index) for index, score in enumerate(scores)]

    def _call_batch(self, inputs: Sequence[RewardInput], logged: _Logged) -> Any:
        names = dict.fromkeys(name for item in inputs for name in item.metadata)
        columns = {name: [item.metadata.get(name) for item in inputs] for name in names}
        states = (item.trainer_state for item in inputs)
        arguments = columns | {
            "prompts": [[*item.messages] or item.prompt for item in inputs],
            "completions": [
                [{"role": "assistant", "content": item.completion}]
                if item.messages
                else item.completion
                for item in inputs
            ],
            "completion_ids": [list(item.completion_ids) for item in inputs],
            "answer": [item.metadata.get("answer", item.answer) for item in inputs],
            "trainer_state": max(states, key=lambda state: state.global_step),
            "log_extra": logged.log_extra,
            "log_metric": logged.log_metric,
        }
        named = self._named(arguments)
        return self.function(**(arguments if self._takes_columns else named))


@dataclass(frozen=True, slots=True)
class _Logged:
    """What a function logs in one call."""

    num: int
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        if len(values) != self.num:
            raise ValueError(
                f"log_extra({column!r}): expected {self.num} values, one a completion, found "
                f"{len(values)}"
            )
        self.columns[column] = [*values]

    def log_metric(self, name: str, value: float) -> None:
        """Log a number for the whole call; of several values the mean counts."""
        self.metrics[re.sub(r"[^\w.-]", "-", name)].append(float(value))

    def add_to(self, score: Score, index: int) -> Score:
        means = {name: fmean(values) for name, values in self.metrics.items()}
        parts = (RewardPart(n, mean if math.isfinite(mean) else None) for n, mean in means.items())
        extra = {column: values[index] for column, values in self.columns.items()}
        return replace(score, parts=(*score.parts, *parts), extra={**score.extra, **extra})


def _as_list(result: Any, num: int) -> list[Any]:
    if isinstance(result, BaseException):
        raise result
    try:
        rewards = list(result)
    except TypeError:
        rewards = None
    if rewards is None or len(rewards) != num:
        description = repr(result) if rewards is None else f"{len(rewards)} of them"
        raise TypeError(
            f"the verifier must return a list of {num} rewards, found {description:.80}"
        )
    return rewards


class LimitedReward:
    """A user's `Reward`, with a time limit of `timeout_s` per completion."""

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


def as_score(result: Any) -> Score:
    """Return the score of what a verifier returned or raised.

    A bare number has no verdict yet: the weighted sum decides whether it passes.
    """
    try:
        if isinstance(result, BaseException):
            raise result
        if isinstance(result, Mapping) and "score" in result:
            extra = {name: value for name, value in result.items() if name != "score"}
            return Score(_as_number(result["score"]), extra=extra)
        return result if isinstance(result, Score) else Score(_as_number(result))
    except Exception as error:  # noqa: BLE001 - counted, and stored with its completion
        FAILURES.note(error)
        return Score(None, "error", error=cause_of(error))


def _as_number(result: Any) -> float:
    try:
        return float(result)
    except (TypeError, ValueError):
        message = (
            f"the verifier returned {result!r:.80}, expected a number, a Score, or a dict with "
            "'score'"
        )
        raise TypeError(message) from None


async def call_in_thread(
    calls: Sequence[Callable[[], Any]], *, limit_s: float
) -> list[Any | BaseException]:
    """Return what calls returned or raised, made one after the other in a thread of their own.

    If a call exceeds the limit, another thread makes the remaining ones. A single thread for all
    calls spares the event loop one turn per call: a third of a reward worker's time.
    """
    outcomes: list[Any | BaseException] = []
    while len(outcomes) < len(calls):
        outcomes += await _until_one_hangs(calls[len(outcomes) :], limit_s)
    return outcomes


async def _until_one_hangs(
    calls: Sequence[Callable[[], Any]], limit_s: float
) -> list[Any | BaseException]:
    """Return outcomes of calls; the last is an error if that call exceeded the limit."""
    outcomes: list[Any | BaseException] = []
    abandoned, began, thread_id = threading.Event(), monotonic(), 0

    def run() -> None:
        nonlocal began, thread_id
        thread_id = threading.get_ident()
        for call in calls:
            if abandoned.is_set():
                return
            began = monotonic()
            outcomes.append(_outcome(call))

    ended = asyncio.wrap_future(in_own_thread(run, name="verifier"))
    try:
        while not ended.done():
            num_done = len(outcomes)
            await asyncio.wait([ended], timeout=max(0.0, began + limit_s - monotonic()))
            hangs = not ended.done() and monotonic() - began >= limit_s
            if hangs and len(outcomes) == num_done:
                abandoned.set()
                return [*outcomes[:num_done], _hang_error(limit_s, _users_place(thread_id))]
        return outcomes
    finally:
        ended.cancel()


def _outcome(call: Callable[[], Any]) -> Any | BaseException:
    try:
        return call()
    except SystemExit as exit_:
        return _exit_error(exit_)
    except Exception as error:  # noqa: BLE001 - returned to the caller
        return error


def _hang_error(limit_s: float, where: str = "") -> RewardError:
    return RewardError(
        f"the verifier hangs: no verdict on a completion within {limit_s:g} s{where}. "
        "Give it a time limit of its own, or raise rewards.timeout_s"
    )


def _exit_error(raised: SystemExit) -> RewardError:
    error = RewardError(f"the verifier called sys.exit({raised.code!r}): it must return a reward")
    return error.with_traceback(raised.__traceback__)


def _users_place(thread_id: int) -> str:
    """Describe where in the user's code a thread is."""
    frame = sys._current_frames().get(thread_id)
    frames = users_frames(traceback.extract_stack(frame)) if frame else []
    return f", it stands in {place(frames)}" if frames else ""


async def call_on_loop(call: Callable[[], Awaitable[Any]], *, limit_s: float) -> Any:
    """Await an `async` function on the verifiers' event loop, which outlives this call.

    If a call blocks the loop, the loop is abandoned, and the other calls are repeated on a new one.
    """
    while True:
        loop, run = _current_loop(), _Run(call, limit_s)
        future = asyncio.run_coroutine_threadsafe(run.outcome(loop), loop.loop)
        outcome = asyncio.wrap_future(future)
        try:
            while not (outcome.done() or loop.abandon_if_blocked(run) or loop.cannot_cancel(run)):
                await asyncio.wait([outcome], timeout=limit_s / CHECKS_PER_LIMIT)
            if outcome.done():
                return outcome.result()
        finally:
            outcome.cancel()
        if (
            not loop.is_abandoned
            or loop.blocked_by is run
            or (loop.blocked_by is None and run.began)
        ):
            raise _hang_error(limit_s, loop.blocked_at)


class _Run:
    def __init__(self, call: Callable[[], Awaitable[Any]], limit_s: float) -> None:
        self.limit_s = limit_s
        self.began = 0.0
        """Time of its first step; 0 before that."""
        self._call = call

    async def outcome(self, loop: _VerifierLoop) -> Any:
        _RUN.set(self)  # tasks that this one starts belong to this call, too
        if (task := asyncio.current_task()) is not None:
            loop.runs[task] = self
        self.began = monotonic()
        limit = asyncio.timeout(self.limit_s)
        try:
            async with limit:
                return await self._call()
        except TimeoutError:
            if not limit.expired():
                raise  # raised by the verifier itself
            raise _hang_error(self.limit_s) from None
        except SystemExit as exit_:  # would end the event loop
            raise _exit_error(exit_) from None


class _VerifierLoop:
    """An event loop and its thread, which ends with the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(self._task)
        self.is_abandoned = False
        self.blocked_by: _Run | None = None
        """The call whose step does not end, if known."""
        self.blocked_at = ""
        self._checked_at: float | None = None
        self._last_turn_at = 0.0
        self._checked_task: asyncio.Task[Any] | None = None
        """The task whose step it was then: distinguishes many short steps from a long one."""
        self.runs: WeakKeyDictionary[asyncio.Task[Any], _Run | None] = WeakKeyDictionary()
        self._thread = threading.Thread(target=self._run_loop, name="verifiers", daemon=True)
        self._thread.start()

    def abandon_if_blocked(self, run: _Run) -> bool:
        """Return whether the loop is abandoned; abandon it if one step exceeds its call's limit.

        Args:
            run: its limit counts if the call of the step is unknown.
        """
        if self.is_abandoned:
            return True
        now, task = monotonic(), asyncio.current_task(self.loop)
        if self._checked_at is None or task is not self._checked_task:
            self._checked_at, self._checked_task = now, task
            self.loop.call_soon_threadsafe(self._note_turn)
            return False
        blocking = self.runs.get(task) if task else None
        if now - self._checked_at >= (blocking or run).limit_s:
            self.is_abandoned, self.blocked_by = True, blocking
            self.blocked_at = _users_place(self._thread.ident or 0)
            self.loop.call_soon_threadsafe(self.loop.stop)
        return self.is_abandoned

    def cannot_cancel(self, run: _Run) -> bool:
        """Return whether the loop is free, but a call continues long after its time limit."""
        return bool(run.began) and self._last_turn_at >= run.began + 2 * run.limit_s

    def _note_turn(self) -> None:
        self._checked_at, self._last_turn_at = None, monotonic()

    def _run_loop(self) -> None:
        with suppress(SystemExit):  # raised by a task that a verifier started
            self.loop.run_forever()

    def _task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        self.runs[task] = _RUN.get(None)
        return task


_RUN: ContextVar[_Run | None] = ContextVar("run", default=None)
_lock = threading.Lock()
_loops: list[_VerifierLoop] = []  # at most one


def _current_loop() -> _VerifierLoop:
    """Return the loop of this process, which is kept so that verifiers can keep connections."""
    with _lock:
        if not _loops or _loops[-1].is_abandoned:
            _loops[:] = [_VerifierLoop()]
        return _loops[-1]
