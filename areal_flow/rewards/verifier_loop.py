"""The event loop of `async` verifiers, in a thread of its own: one that blocks it is left behind.

| who             | waits for            | unblocked by                                           |
|-----------------|----------------------|--------------------------------------------------------|
| a call          | its verifier         | the verifier, its time limit, or that the loop is left |
| the loop's turn | the step of one task | its end; never for longer than that call's time limit  |
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from areal_flow.rewards.calls import exits, hangs, standing

LOOKS = 4
"""How often a call looks after the loop within its time limit."""


async def call_on_loop(call: Callable[[], Awaitable[Any]], *, limit_s: float) -> Any:
    """Await an `async` function on the verifiers' event loop, which outlives this call.

    A call that blocks the loop loses it: the other calls are made again on a new one.
    """
    while True:
        loop, run = _current_loop(), _Run(call, limit_s)
        asked = asyncio.run_coroutine_threadsafe(run.outcome(loop), loop.loop)
        outcome = asyncio.wrap_future(asked)
        try:
            while not (outcome.done() or loop.leave_if_blocked(run) or loop.cannot_cancel(run)):
                await asyncio.wait([outcome], timeout=limit_s / LOOKS)
            if outcome.done():
                return outcome.result()
        finally:
            outcome.cancel()
        if not loop.is_left or loop.blocked_by is run or (loop.blocked_by is None and run.began):
            raise hangs(limit_s, loop.standing)


class _Run:
    def __init__(self, call: Callable[[], Awaitable[Any]], limit_s: float) -> None:
        self.limit_s = limit_s
        self.began = 0.0
        """When its first step was made; 0 before that."""
        self._call = call

    async def outcome(self, loop: _VerifierLoop) -> Any:
        loop.begins(self)
        self.began = monotonic()
        limit = asyncio.timeout(self.limit_s)
        try:
            async with limit:
                return await self._call()
        except TimeoutError:
            if not limit.expired():
                raise  # by the verifier itself
            raise hangs(self.limit_s) from None
        except SystemExit as exit_:  # would end the event loop
            raise exits(exit_) from None


class _VerifierLoop:
    """An event loop and its thread, which ends with the process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_task_factory(self._task)
        self.is_left = False
        self.blocked_by: _Run | None = None
        """Whose step does not end, if it is known."""
        self.standing = ""
        self._asked_at: float | None = None
        self._answered_at = 0.0
        self._seen: asyncio.Task[Any] | None = None
        """Whose step it was then: many short steps in a row are no long one."""
        self._runs: WeakKeyDictionary[asyncio.Task[Any], _Run | None] = WeakKeyDictionary()
        self._thread = threading.Thread(target=self._turn, name="verifiers", daemon=True)
        self._thread.start()

    def begins(self, run: _Run) -> None:
        """Note that the current task, and those that it will make, are a call's."""
        _RUN.set(run)
        if (task := asyncio.current_task()) is not None:
            self._runs[task] = run

    def leave_if_blocked(self, run: _Run) -> bool:
        """Return whether the loop is left; leave it if one step outlasts its call's limit.

        Args:
            run: whose limit counts where nobody knows which call the step is of.
        """
        if self.is_left:
            return True
        now, task = monotonic(), asyncio.current_task(self.loop)
        if self._asked_at is None or task is not self._seen:
            self._asked_at, self._seen = now, task
            self.loop.call_soon_threadsafe(self._answer)
            return False
        blocking = self._runs.get(task) if task else None
        if now - self._asked_at >= (blocking or run).limit_s:
            self.is_left, self.blocked_by = True, blocking
            self.standing = standing(self._thread)
            self.loop.call_soon_threadsafe(self.loop.stop)
        return self.is_left

    def cannot_cancel(self, run: _Run) -> bool:
        """Return whether the loop goes round, and a call goes on long after its time limit."""
        return bool(run.began) and self._answered_at >= run.began + 2 * run.limit_s

    def _answer(self) -> None:
        self._asked_at, self._answered_at = None, monotonic()

    def _turn(self) -> None:
        with suppress(SystemExit):  # by a task of a verifier's own
            self.loop.run_forever()

    def _task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        self._runs[task] = _RUN.get(None)
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
