"""Calls a verifier with a time limit, so that its mistakes cost nothing else: it may raise or hang.

A plain function runs in a thread, an `async` one on the event loop of all verifiers, which has a
thread of its own: a call that blocks the loop is left behind with it.

| who             | waits for            | unblocked by                                           |
|-----------------|----------------------|--------------------------------------------------------|
| a call          | its verifier         | the verifier, its time limit, or that the loop is left |
| the loop's turn | the step of one task | its end; never for longer than that call's time limit  |
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from areal_flow.core.errors import RewardError
from areal_flow.core.failures import FailureCounts, in_own_thread
from areal_flow.core.frames import place, users_frames

FAILURES = FailureCounts("a verifier")
"""Of the verifiers of this process."""
CHECKS_PER_LIMIT = 4
"""How often a call checks within its time limit whether the loop is blocked."""


async def call_in_thread(
    calls: Sequence[Callable[[], Any]], *, limit_s: float
) -> list[Any | BaseException]:
    """Return what calls returned or raised, made one after the other in a thread of their own.

    After a call that exceeds the limit, another thread makes the rest. One thread for all saves
    the event loop a turn a call, a third of the reward worker's time of the default job.
    """
    outcomes: list[Any | BaseException] = []
    while len(outcomes) < len(calls):
        outcomes += await _until_one_hangs(calls[len(outcomes) :], limit_s)
    return outcomes


async def _until_one_hangs(
    calls: Sequence[Callable[[], Any]], limit_s: float
) -> list[Any | BaseException]:
    outcomes: list[Any | BaseException] = []
    given_up, began, thread_id = threading.Event(), monotonic(), 0

    def run() -> None:
        nonlocal began, thread_id
        thread_id = threading.get_ident()
        for call in calls:
            if given_up.is_set():
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
                given_up.set()
                return [*outcomes[:num_done], hang_error(limit_s, users_place(thread_id))]
        return outcomes
    finally:
        ended.cancel()


def _outcome(call: Callable[[], Any]) -> Any | BaseException:
    try:
        return call()
    except SystemExit as exit_:
        return exit_error(exit_)
    except Exception as error:  # noqa: BLE001 - returned to the caller
        return error


def hang_error(limit_s: float, where: str = "") -> RewardError:
    return RewardError(
        f"the verifier hangs: no verdict on a completion within {limit_s:g} s{where}. "
        "Give it a time limit of its own, or raise rewards.timeout_s"
    )


def exit_error(raised: SystemExit) -> RewardError:
    error = RewardError(f"the verifier called sys.exit({raised.code!r}): it must return a reward")
    return error.with_traceback(raised.__traceback__)


def users_place(thread_id: int) -> str:
    frame = sys._current_frames().get(thread_id)
    frames = users_frames(traceback.extract_stack(frame)) if frame else []
    return f", it stands in {place(frames)}" if frames else ""


async def call_on_loop(call: Callable[[], Awaitable[Any]], *, limit_s: float) -> Any:
    """Await an `async` function on the verifiers' event loop, which outlives this call.

    A call that blocks the loop loses it: the other calls are made again on a new one.
    """
    while True:
        loop, run = _current_loop(), _Run(call, limit_s)
        future = asyncio.run_coroutine_threadsafe(run.outcome(loop), loop.loop)
        outcome = asyncio.wrap_future(future)
        try:
            while not (outcome.done() or loop.leave_if_blocked(run) or loop.cannot_cancel(run)):
                await asyncio.wait([outcome], timeout=limit_s / CHECKS_PER_LIMIT)
            if outcome.done():
                return outcome.result()
        finally:
            outcome.cancel()
        if not loop.is_left or loop.blocked_by is run or (loop.blocked_by is None and run.began):
            raise hang_error(limit_s, loop.where)


class _Run:
    def __init__(self, call: Callable[[], Awaitable[Any]], limit_s: float) -> None:
        self.limit_s = limit_s
        self.began = 0.0
        """When its first step was made; 0 before that."""
        self._call = call

    async def outcome(self, loop: _VerifierLoop) -> Any:
        _RUN.set(self)  # tasks that this one makes are this call's, too
        if (task := asyncio.current_task()) is not None:
            loop.runs[task] = self
        self.began = monotonic()
        limit = asyncio.timeout(self.limit_s)
        try:
            async with limit:
                return await self._call()
        except TimeoutError:
            if not limit.expired():
                raise  # by the verifier itself
            raise hang_error(self.limit_s) from None
        except SystemExit as exit_:  # would end the event loop
            raise exit_error(exit_) from None


class _VerifierLoop:
    """An event loop and its thread, which ends with the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(self._task)
        self.is_left = False
        self.blocked_by: _Run | None = None
        """Whose step does not end, if it is known."""
        self.where = ""
        self._checked_at: float | None = None
        self._last_turn_at = 0.0
        self._seen: asyncio.Task[Any] | None = None
        """Whose step it was then: many short steps in a row are no long one."""
        self.runs: WeakKeyDictionary[asyncio.Task[Any], _Run | None] = WeakKeyDictionary()
        self._thread = threading.Thread(target=self._run_loop, name="verifiers", daemon=True)
        self._thread.start()

    def leave_if_blocked(self, run: _Run) -> bool:
        """Return whether the loop is left; leave it if one step outlasts its call's limit.

        Args:
            run: whose limit counts where nobody knows which call the step is of.
        """
        if self.is_left:
            return True
        now, task = monotonic(), asyncio.current_task(self.loop)
        if self._checked_at is None or task is not self._seen:
            self._checked_at, self._seen = now, task
            self.loop.call_soon_threadsafe(self._note_turn)
            return False
        blocking = self.runs.get(task) if task else None
        if now - self._checked_at >= (blocking or run).limit_s:
            self.is_left, self.blocked_by = True, blocking
            self.where = users_place(self._thread.ident or 0)
            self.loop.call_soon_threadsafe(self.loop.stop)
        return self.is_left

    def cannot_cancel(self, run: _Run) -> bool:
        """Return whether the loop is free, and a call goes on long after its time limit."""
        return bool(run.began) and self._last_turn_at >= run.began + 2 * run.limit_s

    def _note_turn(self) -> None:
        self._checked_at, self._last_turn_at = None, monotonic()

    def _run_loop(self) -> None:
        with suppress(SystemExit):  # by a task of a verifier's own
            self.loop.run_forever()

    def _task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        self.runs[task] = _RUN.get(None)
        return task


_RUN: ContextVar[_Run | None] = ContextVar("run", default=None)
_lock = threading.Lock()
_loops: list[_VerifierLoop] = []
"""The one in use is the last."""


def _current_loop() -> _VerifierLoop:
    """Return the loop in use; one for the whole process, so that what verifiers keep stays good."""
    with _lock:
        if not _loops or _loops[-1].is_left:
            _loops[:] = [_VerifierLoop()]
        return _loops[-1]
