"""A training run in a thread of this process, while a notebook or a script goes on.

A thread, and no process of its own, so that `on_step` can be any function of the notebook, and so
that nothing is left over: if the kernel is killed, its workers end with it, and everything
committed is safe. The work that competes with the notebook for the interpreter is small, since
generators, rewards and the trainer are processes.
"""

from __future__ import annotations

import concurrent.futures.thread
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

from areal_flow.config import Recipe
from areal_flow.core.errors import RunError
from areal_flow.core.layout import RunLayout
from areal_flow.log.directory import State, observed_state
from areal_flow.log.ledger import LedgerReader
from pipelines.jobs.stop_signals import (
    EXIT,
    REQUESTED,
    WAKE_EVERY_S,
    Outcome,
    StoppedAtOnce,
    stop_sender,
)
from pipelines.jobs.train import run_training
from pipelines.notebook import Run, open_run


@dataclass(frozen=True, slots=True)
class Status:
    state: State
    step: int
    """The last committed step."""
    num_steps: int

    def __str__(self) -> str:
        return f"{self.state}, step {self.step} of {self.num_steps}"


class BackgroundRun:
    """A run that trains in the background, as `train(wait=False)` returns it.

    An interrupt of a notebook's cell does not reach it: `stop` does. It stops at once where its
    process ends: a script calls `result` before its end.
    """

    def __init__(self) -> None:
        self._prepared: Future[tuple[RunLayout, Callable[[str], object]]] = Future()
        self._result: Future[Run] = Future()
        self._is_abandoned = False

    @property
    def run(self) -> Run:
        """The run, to query and to plot at any time."""
        return open_run(self._layout.root)

    @property
    def status(self) -> Status:
        """State (`running`, `finished`, `stopped` or `failed`), step, and number of steps."""
        state = observed_state(self._layout).state
        return Status(state, max(0, LedgerReader(self._layout).head), self.run.recipe.num_steps)

    def stop(self) -> None:
        """Request the end after the current step, with a checkpoint, as Ctrl-C does.

        It returns immediately; `result` waits for the end. A second call ends the run at once.
        """
        _, send = self._prepared.result()
        send(REQUESTED)

    def result(self, timeout: float | None = None) -> Run:
        """Wait for the end; return the run, finished or stopped.

        Args:
            timeout: in seconds; by default none.

        Raises:
            TimeoutError: the run goes on; so it does after an interrupt.
            ArealFlowError: the run failed.
            KeyboardInterrupt: stopped twice, or while there was no step to finish.
        """
        _wait(self._result, timeout)
        if not self._result.done():
            raise TimeoutError(
                f"run {self._layout.name} goes on after {timeout:g} s: {self.status}"
            )
        return self._result.result()

    def __repr__(self) -> str:
        return f"<BackgroundRun {self._layout.name}: {self.status}>"

    @property
    def _layout(self) -> RunLayout:
        return self._prepared.result()[0]

    async def drive(self, layout: RunLayout, recipe: Recipe, **how: Any) -> Outcome:
        """Take the place of `run_training`, which is called when a run is prepared."""
        if self._is_abandoned:
            raise StoppedAtOnce("SIGINT")
        self._prepared.set_result((layout, stop_sender()))
        return await run_training(layout, recipe, **how)

    def begin(self, launch: Callable[[], RunLayout]) -> None:
        """Call `launch` in a thread; return, or raise its error, once the run is prepared."""
        global _current
        refuse_second_run()
        _current = self
        # The context names the notebook's cell under which the thread's output stands.
        thread = threading.Thread(
            target=partial(copy_context().run, self._work, launch), name="areal-flow", daemon=True
        )
        thread.start()
        # Called before thread pools are closed, without which the run could not stop, and before
        # the interpreter ends, which aborts in a thread that is in a library's code.
        assert concurrent.futures.thread  # registers itself first
        threading._register_atexit(self._stop_at_exit)  # type: ignore[attr-defined]
        try:
            _wait(self._prepared)
        except KeyboardInterrupt:
            self._is_abandoned = True
            raise
        self._prepared.result()

    def _stop_at_exit(self) -> None:
        if self._result.done():
            return
        self._is_abandoned = True
        if self._prepared.done() and not self._prepared.exception():
            self._prepared.result()[1](EXIT)
        _wait(self._result)

    def _work(self, launch: Callable[[], RunLayout]) -> None:
        global _current
        try:
            result = open_run(launch().root)
        except BaseException as error:  # noqa: BLE001  `result` or `begin` raises it
            _current = None
            self._result.set_exception(error)
            if not self._prepared.done():
                self._prepared.set_exception(error)
        else:
            _current = None
            self._result.set_result(result)


_current: BackgroundRun | None = None


def refuse_second_run() -> None:
    """Refuse a cluster beside that of a background run: both would set up the same libraries."""
    if _current is not None:
        what = repr(_current) if _current._prepared.done() else "a run"
        raise RunError(
            f"{what} uses this process: wait for its result(), end it by stop(), or use another "
            "process, such as `areal-flow evaluate` in a terminal"
        )


def _wait(future: Future[Any], timeout: float | None = None) -> None:
    """Wait for a future, and handle interrupts meanwhile.

    Python handles signals between waits: a library's handler with SA_RESTART ends no wait.
    """
    left = float("inf") if timeout is None else timeout
    while not future.done() and left > 0:
        wait([future], timeout=min(left, WAKE_EVERY_S))
        left -= WAKE_EVERY_S
