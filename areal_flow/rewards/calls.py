"""Calls a verifier so that none of its mistakes is more than its own: it may raise, exit or hang.

What it raised is said once, with the user's own frames, and from then on only counted: once a
process, since each reward worker is one.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import compress
from pathlib import Path
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any

from areal_flow.errors import RewardError

logger = logging.getLogger(__name__)

OWN_FILES = Path(__file__).parent
"""A traceback begins beyond these, in the file of the verifier."""
LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
"""Where Python's modules are, and installed packages."""


class VerifierHangs(RewardError):
    """A verifier took longer than its limit over one completion; it cannot be stopped."""


class VerifierExits(RewardError):
    """A verifier called `sys.exit`; the completion fails, and the worker goes on."""


async def call_in_thread(call: Callable[[], Any], *, limit_s: float) -> Any:
    """Return what a call returns, or wait for it no longer.

    The thread is one of its own, which ends with the process: a call that hangs keeps no other
    waiting.

    Raises:
        VerifierExits: it called `sys.exit`.
        VerifierHangs: it took longer than the limit.
        Exception: as raised by the call.
    """
    loop = asyncio.get_running_loop()
    returned: asyncio.Future[Any] = loop.create_future()

    def settle(settling: Callable[[Any], None], value: Any) -> None:
        if not returned.done():
            settling(value)

    def run() -> None:
        settling: Callable[[Any], None] = returned.set_result
        try:
            value = call()
        except SystemExit as exit_:
            settling, value = returned.set_exception, _exits(exit_)
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            settling, value = returned.set_exception, error
        with suppress(RuntimeError):  # the loop is closed: nobody waits for it
            loop.call_soon_threadsafe(settle, settling, value)

    thread = threading.Thread(target=run, name="verifier", daemon=True)
    thread.start()
    return await _limited(returned, limit_s, lambda: _standing(thread))


async def call_on_loop(call: Callable[[], Awaitable[Any]], *, limit_s: float) -> Any:
    """As `call_in_thread`, for an `async` function: on the event loop, which it must not block."""
    try:
        return await _limited(call(), limit_s, lambda: "")
    except SystemExit as exit_:  # would end the event loop
        raise _exits(exit_) from None


async def _limited(awaited: Awaitable[Any], limit_s: float, standing: Callable[[], str]) -> Any:
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await awaited
    except TimeoutError:
        if not limit.expired():
            raise  # by the verifier itself
        raise VerifierHangs(
            f"the verifier hangs: no verdict on a completion within {limit_s:g} s{standing()}. "
            "Give it a time limit of its own, or raise rewards.timeout_s"
        ) from None


def _exits(raised: SystemExit) -> VerifierExits:
    error = VerifierExits(f"the verifier called sys.exit({raised.code!r}): it must return a reward")
    return error.with_traceback(raised.__traceback__)


def _standing(thread: threading.Thread) -> str:
    """Return in words where a thread stands in the user's code."""
    frame: FrameType | None = sys._current_frames().get(thread.ident or 0)
    frames = users_frames(traceback.extract_stack(frame)) if frame else []
    return f", it stands in {place(frames)}" if frames else ""


class FailureCounts:
    """Says each distinct failure once, and then counts how often it comes again."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[object, ...]] = Counter()
        self._words: dict[tuple[object, ...], str] = {}

    def note(self, error: BaseException) -> None:
        """Log the first failure of its type and frames with its traceback, and powers of ten."""
        frames = users_frames(traceback.extract_tb(error.__traceback__))
        kind = (type(error), *((f.filename, f.lineno, f.name) for f in frames))
        self._counts[kind] += 1
        times = self._counts[kind]
        if times == 1:
            where = f" in {place(frames)}" if frames else ""
            self._words[kind] = f"{type(error).__name__}{where}"
            logger.error(
                "a verifier failed; the same failure is only counted from now on\n%s",
                _formatted(error, frames),
            )
        elif str(times).strip("0") == "1":
            logger.warning("a verifier failed %d times so far: %s", times, self._words[kind])

    def sum_up(self) -> None:
        """Log how often each failure came again, and forget them."""
        for kind, times in self._counts.items():
            if times > 1:
                logger.warning("a verifier failed %d times: %s", times, self._words[kind])
        self._counts.clear()


FAILURES = FailureCounts()
"""Of the verifiers of this process."""


def users_frames(frames: StackSummary) -> list[FrameSummary]:
    """Return the frames from the first one in the user's code on, the innermost last."""
    outer = [Path(frame.filename).is_relative_to(OWN_FILES) for frame in frames]
    first = max((place for place, is_own in enumerate(outer) if is_own), default=-1) + 1
    return list(frames[first:])


def cause_of(error: BaseException) -> str:
    """Return in words what was raised, and where in the user's code."""
    frames = users_frames(traceback.extract_tb(error.__traceback__))
    return f"{type(error).__name__}: {error}" + (f" (at {place(frames)})" if frames else "")


def place(frames: Sequence[FrameSummary]) -> str:
    """Return in words where frames stand: the innermost one that is in no library."""
    files = [Path(frame.filename) for frame in frames]
    is_own = [not any(file.is_relative_to(library) for library in LIBRARIES) for file in files]
    frame = ([*compress(frames, is_own)] or frames)[-1]
    return f"{frame.name}, {Path(frame.filename).name}, line {frame.lineno}"


def _formatted(error: BaseException, frames: list[FrameSummary]) -> str:
    described = traceback.TracebackException.from_exception(error)
    described.stack = StackSummary.from_list(frames)
    return "".join(described.format()).rstrip()
