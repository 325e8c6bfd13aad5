"""Makes an `Engine` of an `EngineCore`: one thread decodes, and the event loop only waits.

| who             | waits for             | unblocked by                                 |
|-----------------|-----------------------|----------------------------------------------|
| decode thread   | work, and to be awake | a command: add, cancel, load, wake, close    |
| `generate`      | a group's last member | the decode thread, after the step that ends it |
| `sleep`, `wake` | the current step      | the decode thread                            |
| `load_weights`  | the reader            | a thread that loads while decoding goes on   |
|                 | the switch            | the decode thread, between two decode steps  |
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
import uuid
from collections.abc import Callable
from time import perf_counter
from typing import Any

from areal_flow.core.errors import EngineError
from areal_flow.core.types import Completion, EngineStats, GroupRequest
from areal_flow.policy.weights.channel import WeightsReader
from areal_flow.rollout.engines.protocol import EngineCore

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 2e-4


def _do_nothing() -> None: ...


class ThreadedEngine:
    """An `Engine` whose core runs in a thread.

    `end` ends the core's process, if it has one. Between two steps, `suspend` frees a device's
    memory and `resume` takes it again.
    """

    def __init__(
        self,
        core: EngineCore,
        end: Callable[[], None] = _do_nothing,
        *,
        suspend: Callable[[], None] = _do_nothing,
        resume: Callable[[], None] = _do_nothing,
    ) -> None:
        self._core = core
        self._end = end
        self._suspend, self._resume = suspend, resume
        self._asleep = False
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: dict[str, asyncio.Future[list[Completion]]] = {}
        self._loads: list[tuple[int, asyncio.Future[None]]] = []
        self._outstanding: set[asyncio.Future[Any]] = set()
        self._loop = asyncio.get_running_loop()
        self._incarnation = uuid.uuid4().hex[:8]
        self._num_tokens = 0
        self._started_at = perf_counter()
        self._busy = 0.0, self._started_at
        """Busy seconds, and when they were counted: one tuple, since the thread replaces it."""
        self._stall_s = 0.0
        self._broken: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        return self._core.version

    @property
    def broken(self) -> bool:
        return self._broken is not None

    async def generate(self, request: GroupRequest) -> list[Completion]:
        future: asyncio.Future[list[Completion]] = self._promise()

        def add() -> None:
            try:
                self._core.add(request)
            except EngineError as error:
                self._resolve(future, error=error)
            else:
                self._waiting[request.request_id] = future

        self._commands.put(add)
        try:
            return await future
        except asyncio.CancelledError:
            self._commands.put(lambda: self._cancel(request.request_id))
            raise

    async def load_weights(self, version: int, reader: WeightsReader) -> None:
        tensors = await asyncio.to_thread(reader.load, version)
        future: asyncio.Future[None] = self._promise()

        def load() -> None:
            self._loads.append((version, future))
            self._core.load_weights(tensors, version=version)

        self._commands.put(load)
        await future

    async def sleep(self) -> None:
        await self._between_steps(self._suspend, asleep=True)

    async def wake(self) -> None:
        await self._between_steps(self._resume, asleep=False)

    async def _between_steps(self, change: Callable[[], None], *, asleep: bool) -> None:
        future: asyncio.Future[None] = self._promise()

        def run() -> None:
            change()
            self._asleep = asleep
            self._resolve(future, None)

        self._commands.put(run)
        await future

    def _has_work(self) -> bool:
        return not self._asleep and self._core.has_work()

    def stats(self) -> EngineStats:
        busy_s, until = self._busy
        elapsed_s = until - self._started_at
        return EngineStats(self._incarnation, self._num_tokens, busy_s, self._stall_s, elapsed_s)

    def occupancy(self) -> dict[str, float]:
        return {**self._core.occupancy(), "draining": float(bool(self._loads))}

    def close(self) -> None:
        """End the thread after its current step; requests that still wait get an `EngineError`."""
        self._closing = True
        self._commands.put(lambda: None)
        self._thread.join()
        self._end()

    def _promise(self) -> asyncio.Future[Any]:
        if self._broken or self._closing:
            raise self._error()
        future = self._loop.create_future()
        self._outstanding.add(future)
        future.add_done_callback(self._outstanding.discard)
        return future

    def _error(self) -> EngineError:
        return EngineError(f"the engine is down: {self._broken or 'it was closed'}")

    def _cancel(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._core.cancel(request_id)

    def _run(self) -> None:
        # Each torch call releases the GIL. Waiting 5 ms (the default) to get it back, while the
        # event loop is busy, would cost as much as the decode step.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            while not self._closing:
                if not self._has_work():
                    self._commands.get()()
                version, start = self._core.version, perf_counter()
                while not self._commands.empty():
                    self._commands.get()()
                if self._has_work():
                    for request_id, completions in self._core.step():
                        self._num_tokens += sum(len(c.tokens) for c in completions)
                        self._resolve(self._waiting.pop(request_id), completions)
                until = perf_counter()
                seconds = until - start
                self._busy = self._busy[0] + seconds, until
                if self._core.version != version:
                    self._stall_s += seconds
                for served in [load for load in self._loads if load[0] <= self._core.version]:
                    self._loads.remove(served)
                    self._resolve(served[1], None)
        except BaseException as error:
            logger.exception("the engine's thread ended")
            # The traceback would keep the engine, and the device memory that its successor needs.
            self._broken = error.with_traceback(None)
        self._loop.call_soon_threadsafe(self._fail_outstanding)

    def _fail_outstanding(self) -> None:
        for future in list(self._outstanding):
            if not future.done():
                future.set_exception(self._error())

    def _resolve(
        self, future: asyncio.Future[Any], result: Any = None, error: Exception | None = None
    ) -> None:
        def settle() -> None:
            if future.done():
                return
            if error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._loop.call_soon_threadsafe(settle)
