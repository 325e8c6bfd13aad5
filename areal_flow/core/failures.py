"""Repeated failures: of users' code, and of updates.

Users' code runs in a thread of its own. A failure of it is logged once a process with the user's
own frames, and from then on only counted.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from traceback import FrameSummary, StackSummary
from typing import TypeVar

from areal_flow.core.errors import ArealFlowError, TrainingError, is_users, place, users_frames

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_CHARACTERS = 1000
"""How much of an error's message is stored: it may quote a whole document."""


def in_own_thread(call: Callable[[], Result], *, name: str) -> Future[Result]:
    """Make a call in a thread that ends with the process: one that hangs blocks no other."""
    outcome: Future[Result] = Future()
    outcome.set_running_or_notify_cancel()  # nothing cancels a thread

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            outcome.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return outcome


class FailureCounts:
    """Logs each distinct failure once, and then counts how often it comes again."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
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
                "%s failed; the same failure is only counted from now on\n%s",
                *(self._subject, _formatted(error, frames)),
            )
        elif str(times).strip("0") == "1":
            logger.warning("%s failed %d times so far: %s", self._subject, times, self._words[kind])

    def sum_up(self) -> None:
        for kind, times in self._counts.items():
            if times > 1:
                logger.warning("%s failed %d times: %s", self._subject, times, self._words[kind])
        self._counts.clear()


def cause_of(error: BaseException) -> str:
    """Return what was raised, its message cut, and where in the user's code it was raised."""
    frames = users_frames(traceback.extract_tb(error.__traceback__))
    where = f" (at {place(frames)})" if any(map(is_users, frames)) else ""
    message = str(error)
    if len(message) > MAX_CHARACTERS:
        message = f"{message[:MAX_CHARACTERS]}... ({len(message):,} characters)"
    return f"{type(error).__name__}: {message}{where}"


def _formatted(error: BaseException, frames: list[FrameSummary]) -> str:
    """Return a traceback; what it was raised over has the user's frames alone.

    An error of ours has a message that says all, and no frames if none is the user's.
    """
    described = traceback.TracebackException.from_exception(error)
    if isinstance(error, ArealFlowError) and not any(map(is_users, frames)):
        frames = []
    described.stack = StackSummary.from_list(frames)
    over = described.__cause__ or described.__context__
    while over is not None:
        over.stack = StackSummary.from_list([*filter(is_users, over.stack)])
        over = over.__cause__ or over.__context__
    return "".join(described.format()).rstrip()


def first_line(error: BaseException) -> str:
    """Return what went wrong; a database adds its statement with hundreds of parameters."""
    return str(error).strip().partition("\n")[0]


MAX_SKIPPED_STEPS = 5
"""After so many in a row a run ends: the policy will not recover by itself."""


@dataclass
class SkippedSteps:
    """Ends a run in which too many steps in a row skipped an update."""

    _num_in_a_row: int = 0

    def count(self, step: int, *, skipped: bool) -> None:
        self._num_in_a_row = self._num_in_a_row + 1 if skipped else 0
        if self._num_in_a_row >= MAX_SKIPPED_STEPS:
            raise TrainingError(
                f"expected a finite loss and gradient, found {self._num_in_a_row} steps in a row, "
                f"the last one {step}, with an update that was skipped because loss or gradient "
                "was not finite: start a new run with a lower learning rate"
            )
