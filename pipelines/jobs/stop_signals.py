"""Run and stop a driver: the first signal lets the step finish, the second stops at once."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from pipelines.console.run_log import say

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REQUESTED = "stop()"
"""What takes the place of a signal's name where a program requests the stop."""
EXIT = "end of the process"
"""And where the program ends while the work goes on: it stops at once."""
WAKE_EVERY_S = 0.2
_RECEIVERS: dict[asyncio.AbstractEventLoop, Callable[[str], object]] = {}
"""Receivers of signals, by event loop."""


@dataclass(frozen=True, slots=True)
class Outcome:
    finished: bool
    stopped_by: str = ""


class StopSignals:
    """Handles `STOPS` while entered; created and used on the event loop.

    Outside `finishing_steps` there is no step to finish, and the first signal ends everything.
    Python handles signals in the main thread only: elsewhere `wait_for` passes them on.
    """

    def __init__(self) -> None:
        self.received: list[str] = []
        self._request_stop: Callable[[], None] | None = None
        self._driver = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        is_main = threading.current_thread() is threading.main_thread()
        self._handlers = {
            number: signal.getsignal(number)
            for number in STOPS
            if is_main and not _is_run_by_nohup(number)
        }

    def __enter__(self) -> StopSignals:
        for number in self._handlers:
            self._loop.add_signal_handler(number, self._on_signal, number.name)
        _RECEIVERS[self._loop] = self._on_signal
        return self

    def __exit__(self, *_: object) -> None:
        del _RECEIVERS[self._loop]
        for number, handler in self._handlers.items():
            self._loop.remove_signal_handler(number)
            signal.signal(number, handler or signal.SIG_DFL)

    @contextmanager
    def finishing_steps(self, request_stop: Callable[[], None]) -> Iterator[None]:
        """Have the first signal only request a stop."""
        self._request_stop = request_stop
        try:
            yield
        finally:
            self._request_stop = None

    def _on_signal(self, name: str) -> None:
        self.received.append(name)
        if name == "SIGHUP":
            _leave_closed_terminal()
        if self._request_stop is not None and len(self.received) == 1 and name != EXIT:
            say("", f"{name}: finishing this step; once more to stop at once")
            self._request_stop()
        elif self._driver is not None:
            say("", f"{name}: stopping at once")
            # Ignore errors of cancelled tasks.
            self._loop.set_exception_handler(lambda _, context: logger.debug("%s", context))
            self._driver.cancel(name)


class StoppedAtOnce(KeyboardInterrupt):
    """A signal ended the work; notebooks show one line, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: stopped at once by {self}"]


def _is_run_by_nohup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


@contextmanager
def raised_as_interrupts() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise an exception in the block, as SIGINT does.

    Not in a notebook: there they are meant for the kernel.
    """

    def interrupt(number: int, _: object) -> None:
        if number == signal.SIGHUP:
            _leave_closed_terminal()
        raise StoppedAtOnce(signal.Signals(number).name)

    is_program = threading.current_thread() is threading.main_thread() and not is_loop_running()
    numbers = [each for each in STOPS if signal.getsignal(each) == signal.SIG_DFL]
    for number in numbers if is_program else ():
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers if is_program else ():
            signal.signal(number, signal.SIG_DFL)


def _leave_closed_terminal() -> None:
    """Write to nowhere if standard output or error is a terminal that was closed."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"\n")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def wait_for(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run a coroutine to its end, in a thread of its own where an event loop runs already.

    A notebook's cell is on a running loop. Interrupts of the cell are passed on to the thread.
    """
    try:
        return _run_in_thread(work()) if is_loop_running() else asyncio.run(work())
    except asyncio.CancelledError as stop:
        if (name := str(stop)) not in {*signal.Signals.__members__, REQUESTED, EXIT}:
            raise
    raise StoppedAtOnce(name)  # with no context, of which a notebook would print all


def is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def is_called_from_python() -> bool:
    """Return whether a notebook or a background thread runs the work, not a program's main thread.

    Commands to go on with are then in Python, and what is said is no error.
    """
    return is_loop_running() or threading.current_thread() is not threading.main_thread()


def stop_sender() -> Callable[[str], object]:
    """Return what sends a signal, or `REQUESTED`, to the current task from any other thread."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def receive(name: str) -> None:
        receiver: Callable[[str], object] = _RECEIVERS.get(loop, task.cancel)
        receiver(name)

    def send(name: str) -> None:
        with suppress(RuntimeError):  # the loop is closed: the work is done
            loop.call_soon_threadsafe(receive, name)

    return send


def _run_in_thread(work: Coroutine[Any, Any, Result]) -> Result:
    started: Future[Callable[[str], object]] = Future()
    interrupts: list[str] = []

    async def run() -> Result:
        started.set_result(stop_sender())
        return await work

    with ThreadPoolExecutor(max_workers=1) as thread, _interrupts_noted(interrupts):
        running = thread.submit(asyncio.run, run())
        # Python handles signals between waits: a library's handler with SA_RESTART ends no wait.
        while wait([running], timeout=WAKE_EVERY_S).not_done:
            while interrupts and started.done():
                started.result()(interrupts.pop(0))
        return running.result()


@contextmanager
def _interrupts_noted(noted: list[str]) -> Iterator[None]:
    """Append to a list instead of raising KeyboardInterrupt; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: noted.append("SIGINT"))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
