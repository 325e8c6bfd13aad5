"""Which frames of a traceback are the user's: not those of this project, Python or a package."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary, StackSummary

OWN_FILES = Path(__file__).parent.parent
"""A traceback begins beyond these, in the file of the user."""
OWN_PACKAGES = tuple(OWN_FILES.with_name(name) for name in ("areal_flow", "pipelines", "schemas"))
LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
"""Where Python's modules are, and installed packages."""


def users_frames(frames: StackSummary) -> list[FrameSummary]:
    """Return the frames from the first one in the user's code on, the innermost last.

    Where an installed library failed, those beyond our own; where our own code failed, all.
    """
    outer = [Path(frame.filename).is_relative_to(OWN_FILES) for frame in frames]
    beyond = max((place for place, is_own in enumerate(outer) if is_own), default=-1) + 1
    first = next((place for place, frame in enumerate(frames) if is_users(frame)), beyond)
    return list(frames[first:] or frames)


def is_users(frame: FrameSummary) -> bool:
    if (frame.filename, frame.name) == ("<string>", "__init__"):
        return False  # generated: a dataclass's own
    file = Path(frame.filename)
    return not any(file.is_relative_to(others) for others in (*OWN_PACKAGES, *LIBRARIES))


def place(frames: Sequence[FrameSummary]) -> str:
    """Describe the innermost frame of the user's own code."""
    frame = ([*filter(is_users, frames)] or frames)[-1]
    return f"{frame.name}, {Path(frame.filename).name}, line {frame.lineno}"
