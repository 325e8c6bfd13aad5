"""Every error a caller may want to catch.

    ArealFlowError
    ├── ConfigError         a setting is wrong; nothing was started
    ├── PromptError         a prompt file or row is wrong
    ├── ModelError          a model directory is unusable
    ├── SchemaError         rows do not satisfy their schema
    ├── RunError            the run directory: exists, is locked, is incomplete
    │   └── TokensDropped   tokens of an old step, by the setting `log.keep_tokens_of`
    ├── StorageError        a write failed; the last committed state is intact
    ├── EpisodeError        a workflow failed
    ├── EngineError         a generator cannot serve
    │   └── WorkersLost     a task's workers have died, perhaps because of another task
    ├── RewardError         a verifier cannot be loaded or keeps failing
    │   └── InfrastructureError  no verdict here, through no fault of the completion; ask elsewhere
    ├── TrainingError       a step cannot be computed
    │   └── TrainerLost     the trainer is gone or not at the step's parent; it can be restored
    │       └── DeviceError  its GPU failed or is full: a new process can restore it
    └── WeightsError        weights are missing or are not what was published

A message says what was expected, what was found and what to do.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary, StackSummary


class ArealFlowError(Exception):
    """Root of the tree: anything this project raises on purpose."""

    def __reduce__(self) -> tuple[type[ArealFlowError], tuple[str]]:
        return type(self), (str(self),)

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: which call of the user's it was, and the message."""
        frames = filter(is_users, traceback.extract_tb(self.__traceback__))
        return [*traceback.format_list(frames), f"{type(self).__name__}: {self}"]


class ConfigError(ArealFlowError):
    """A setting is wrong; nothing was started."""


class PromptError(ArealFlowError):
    """A prompt file or one of its rows is wrong."""


class ModelError(ArealFlowError):
    """A model directory is unusable."""


class SchemaError(ArealFlowError):
    """Rows do not satisfy their schema."""


class RunError(ArealFlowError):
    """The run directory exists already, is held by somebody else or is incomplete."""


class TokensDropped(RunError):
    """The tokens of an old step were dropped, by the setting `log.keep_tokens_of`."""


class StorageError(ArealFlowError):
    """A write failed; the last committed state is intact."""


class EpisodeError(ArealFlowError):
    """A workflow failed for all members of a group, or for all answers of an evaluation."""


class EngineError(ArealFlowError):
    """A generator cannot serve."""


class WorkersLost(EngineError):
    """Workers that had a task have died; another of their tasks may be the cause."""


class RewardError(ArealFlowError):
    """A verifier cannot be loaded or keeps failing."""


class InfrastructureError(RewardError):
    """There is no verdict here, through no fault of the completion; elsewhere there may be one."""


class TrainingError(ArealFlowError):
    """A step cannot be computed."""


class TrainerLost(TrainingError):
    """The trainer is gone or not at the step's parent; it can be restored."""


class DeviceError(TrainerLost):
    """The GPU failed or is full; only a new process can restore the trainer."""


class WeightsError(ArealFlowError):
    """Weights are missing or are not what was published."""


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
