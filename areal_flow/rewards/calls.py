"""Calls a verifier so that its mistakes stay its own: it may raise, exit or hang."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from types import FrameType
from typing import Any

from areal_flow.errors import RewardError
from areal_flow.failures import FailureCounts
from areal_flow.frames import place, users_frames


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
    return VerifierHangs(
        f"the verifier hangs: no verdict on a completion within {limit_s:g} s{where}. "
        "Give it a time limit of its own, or raise rewards.timeout_s"
    )


def exits(raised: SystemExit) -> VerifierExits:
    error = VerifierExits(f"the verifier called sys.exit({raised.code!r}): it must return a reward")
    return error.with_traceback(raised.__traceback__)


def standing(thread: threading.Thread) -> str:
    frame: FrameType | None = sys._current_frames().get(thread.ident or 0)
    frames = users_frames(traceback.extract_stack(frame)) if frame else []
    return f", it stands in {place(frames)}" if frames else ""


FAILURES = FailureCounts("a verifier")
"""Of the verifiers of this process."""
