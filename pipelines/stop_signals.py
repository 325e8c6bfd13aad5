"""How a driver is run and stopped: the first signal lets the step finish, the second ends all."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from pipelines.cli.run_log import say

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a driver ended: with its work finished, or stopped by a signal."""

    finished: bool
    stopped_by: str = ""


class StopSignals:
    """Handles both signals while it is entered; made and used on the event loop.

    Outside `finishing_steps` there is no step to finish, and the first signal ends everything.
    Python handles signals in the main thread only: elsewhere this handles none.
    """

    def __init__(self) -> None:
        self.received: list[str] = []
        self._request_stop: Callable[[], None] | None = None
        self._driver = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        is_main = threading.current_thread() is threading.main_thread()
        self._handled = (signal.SIGINT, signal.SIGTERM) if is_main else ()

    def __enter__(self) -> StopSignals:
        for number in self._handled:
            self._loop.add_signal_handler(number, self._on_signal, number.name)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._handled:
            self._loop.remove_signal_handler(number)

    @contextmanager
    def finishing_steps(self, request_stop: Callable[[], None]) -> Iterator[None]:
        """Let the first signal only ask for a stop, while it is entered."""
        self._request_stop = request_stop
        try:
            yield
        finally:
            self._request_stop = None

    def _on_signal(self, name: str) -> None:
        self.received.append(name)
        if self._request_stop is not None and len(self.received) == 1:
            say("", f"{name}: finishing this step; once more to stop at once")
            self._request_stop()
        elif self._driver is not None:
            say("", f"{name}: stopping at once")
            # What is dropped in mid-air now has nothing to tell anybody.
            self._loop.set_exception_handler(lambda _, context: logger.debug("%s", context))
            self._driver.cancel(name)


def wait_for(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run a coroutine to its end, in a thread of its own where an event loop runs already.

    A notebook's cell is on a running loop. An interrupt of the cell ends the work, too.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    started: Future[Callable[[], object]] = Future()

    async def cancellable() -> Result:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        started.set_result(lambda: loop.call_soon_threadsafe(task.cancel, "SIGINT"))
        return await work()

    with ThreadPoolExecutor(max_workers=1) as thread:
        running = thread.submit(asyncio.run, cancellable())
        try:
            return running.result()
        except KeyboardInterrupt:
            started.result()()
            raise
