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
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import compress
from pathlib import Path
from time import monotonic
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


async def call_in_thread(
    calls: Sequence[Callable[[], Any]], *, limit_s: float
) -> list[Any | BaseException]:
    """Make calls one after the other; return what each returned or raised.

    A call that takes longer than the limit raises `VerifierHangs`, and the later ones are made in
    another thread. A thread is one of its own, which ends with the process: a call that hangs
    keeps no other waiting.
    """
    outcomes: list[Any | BaseException] = []
    while len(outcomes) < len(calls):
        outcomes += await _until_one_hangs(calls[len(outcomes) :], limit_s)
    return outcomes


async def _until_one_hangs(
    calls: Sequence[Callable[[], Any]], limit_s: float
) -> list[Any | BaseException]:
    loop, finished = asyncio.get_running_loop(), asyncio.Event()
    given_up = threading.Event()
    outcomes: list[Any | BaseException] = []
    began = monotonic()

    def run() -> None:
        nonlocal began
        for call in calls:
            if given_up.is_set():
                return
            began = monotonic()
            outcomes.append(_outcome(call))
        with suppress(RuntimeError):  # the loop is closed: nobody waits for it
            loop.call_soon_threadsafe(finished.set)

    thread = threading.Thread(target=run, name="verifier", daemon=True)
    thread.start()
    while not finished.is_set():
        num_done = len(outcomes)
        with suppress(TimeoutError):
            await asyncio.wait_for(finished.wait(), max(0.0, began + limit_s - monotonic()))
        if len(outcomes) == num_done and monotonic() - began >= limit_s:
            given_up.set()
            return [*outcomes[:num_done], hangs(limit_s, standing(thread))]
    return outcomes


def _outcome(call: Callable[[], Any]) -> Any | BaseException:
    try:
        return call()
    except SystemExit as exit_:
        return exits(exit_)
    except Exception as error:  # noqa: BLE001 - for whoever asked for the call
        return error


def hangs(limit_s: float, where: str = "") -> VerifierHangs:
    """Return the error of a verifier that took too long."""
    return VerifierHangs(
        f"the verifier hangs: no verdict on a completion within {limit_s:g} s{where}. "
        "Give it a time limit of its own, or raise rewards.timeout_s"
    )


def exits(raised: SystemExit) -> VerifierExits:
    """Return the error of a verifier that called `sys.exit`."""
    error = VerifierExits(f"the verifier called sys.exit({raised.code!r}): it must return a reward")
    return error.with_traceback(raised.__traceback__)


def standing(thread: threading.Thread) -> str:
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
