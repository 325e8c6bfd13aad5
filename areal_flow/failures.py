"""What users' code raises: logged once with their own frames, and from then on only counted.

Once a process, since each worker is one.
"""

from __future__ import annotations

import logging
import sysconfig
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary, StackSummary

from areal_flow.errors import ArealFlowError

logger = logging.getLogger(__name__)

OWN_FILES = Path(__file__).parent
"""A traceback begins beyond these, in the file of the user."""
OWN_PACKAGES = tuple(OWN_FILES.with_name(name) for name in ("areal_flow", "pipelines", "schemas"))
LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
"""Where Python's modules are, and installed packages."""


class FailureCounts:
    """Logs each distinct failure once, and then counts how often it comes again."""

    def __init__(self, subject: str) -> None:
        """Take the words for what fails: a verifier, an episode."""
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
        """Log how often each failure came again, and forget them."""
        for kind, times in self._counts.items():
            if times > 1:
                logger.warning("%s failed %d times: %s", self._subject, times, self._words[kind])
        self._counts.clear()


def users_frames(frames: StackSummary) -> list[FrameSummary]:
    """Return the frames from the first one in the user's code on, the innermost last.

    Where a library that is installed is what failed, they are those beyond our own; where our own
    code failed, they are all.
    """
    outer = [Path(frame.filename).is_relative_to(OWN_FILES) for frame in frames]
    beyond = max((place for place, is_own in enumerate(outer) if is_own), default=-1) + 1
    first = next((place for place, frame in enumerate(frames) if _is_users(frame)), beyond)
    return list(frames[first:] or frames)


def users_calls(frames: StackSummary) -> list[FrameSummary]:
    """Return the frames of the user's own files, down to the call that led to our code."""
    return [frame for frame in frames if _is_users(frame)]


def _is_users(frame: FrameSummary) -> bool:
    file = Path(frame.filename)
    return not any(file.is_relative_to(others) for others in (*OWN_PACKAGES, *LIBRARIES))


def cause_of(error: BaseException) -> str:
    """Return in words what was raised, and where in the user's code if it came through that."""
    frames = users_frames(traceback.extract_tb(error.__traceback__))
    where = f" (at {place(frames)})" if any(map(_is_users, frames)) else ""
    return f"{type(error).__name__}: {error}{where}"


def place(frames: Sequence[FrameSummary]) -> str:
    """Return in words where frames stand: the innermost one of the user's own."""
    frame = ([*filter(_is_users, frames)] or frames)[-1]
    return f"{frame.name}, {Path(frame.filename).name}, line {frame.lineno}"


def _formatted(error: BaseException, frames: list[FrameSummary]) -> str:
    """Return a traceback; what it was raised over has the user's frames alone.

    An error of ours has a message that says all, and no frames if none is the user's.
    """
    described = traceback.TracebackException.from_exception(error)
    if isinstance(error, ArealFlowError) and not any(map(_is_users, frames)):
        frames = []
    described.stack = StackSummary.from_list(frames)
    over = described.__cause__ or described.__context__
    while over is not None:
        over.stack = StackSummary.from_list([*filter(_is_users, over.stack)])
        over = over.__cause__ or over.__context__
    return "".join(described.format()).rstrip()
