"""Virtual time: an event loop whose clock jumps to the next timer, and a generator on it.

The generator decodes all its rows together, one token each per decode step. The time of a step
grows with the number of rows and of tokens in their cache. Nothing happens between two events (a
row starts or ends, new weights arrive), so one process simulates thousands of generators.
"""

from __future__ import annotations

import asyncio
import gc
from bisect import bisect_right
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, pairwise
from math import sqrt
from selectors import SelectSelector
from typing import Any, NamedTuple

from areal_flow.core.errors import EngineError
from areal_flow.core.types import VersionSpan
from areal_flow.planning.costs import Costs
from areal_flow.rollout.engines.protocol import Interruption


class _NoWaiting(SelectSelector):
    """Never waits: there are no files or sockets."""

    def select(self, timeout: float | None = None) -> list[Any]:
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Never sleeps; `time()` is when the latest timer was due."""

    def __init__(self) -> None:
        super().__init__(_NoWaiting())
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> Any:
        """Call the function in this thread: its work takes no virtual time."""
        done = self.create_future()
        done.set_result(func(*args))
        return done

    def _run_once(self) -> None:
        if not self._ready and not self._scheduled:  # type: ignore[attr-defined]
            raise RuntimeError("everything waits, and nothing will ever wake it")
        if not self._ready:  # type: ignore[attr-defined]
            self._now = max(self._now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run_in_virtual_time(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to completion, cancel tasks that are left, and return the result."""
    gc.freeze()  # collections skip what exists already, which saves a third of the time
    try:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(coroutine)
    finally:
        gc.unfreeze()


Spans = tuple[VersionSpan, ...]


@dataclass(eq=False, slots=True)
class Group:
    """Completions that were requested together."""

    ended: asyncio.Future[list[Spans]]
    members: list[Spans]
    num_running: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_running = len(self.members)


class Row(NamedTuple):
    """A running sequence; rows are ordered by their ends, counted in decode steps."""

    end: float
    number: int
    begin: float
    group: Group
    member: int


class VirtualGenerator:
    """Decodes rows up to the time `_at`, which is in the future during prefills."""

    def __init__(
        self,
        costs: Costs,
        *,
        prompt_tokens: float = 0.0,
        interruption: Interruption = "interrupt",
        speed: float = 1.0,
    ) -> None:
        """`speed` is relative to the costs."""
        self.num_groups = 0
        self.busy_s = 0.0
        self.num_tokens = 0.0
        self._costs = costs
        self._prompt_tokens = prompt_tokens
        self._interruption = interruption
        self._speed = speed
        self._rows: list[Row] = []
        self._begins = 0.0
        """Sum of the decode steps at which the rows began."""
        self._waiting: deque[tuple[int, Group, int]] = deque()
        self._numbers = count()
        self._loop = asyncio.get_running_loop()
        self._at = self._loop.time()
        self._steps = 0.0
        self._loads = [(0.0, 0)]
        """The first decode step of each version."""
        self._draining: list[tuple[int, asyncio.Future[None]]] = []
        """With `drain`: versions that wait for the rows to end."""
        self._timer: asyncio.TimerHandle | None = None

    def complete(self, lengths: Sequence[int]) -> asyncio.Future[list[Spans]]:
        """Start completions of these lengths; return a future of their version spans."""
        group = Group(self._loop.create_future(), [() for _ in lengths])
        self._waiting += [(length, group, member) for member, length in enumerate(lengths)]
        self._go_on()
        return group.ended

    def load(self, version: int) -> asyncio.Future[None]:
        """Switch to new weights by the interruption rule; return a future of the switch."""
        self._advance()
        arrived = self._loop.create_future()
        if self._interruption == "drain" and self._rows:
            self._draining.append((version, arrived))
            return arrived
        if self._interruption == "interrupt":
            self._prefill(self._num_cached * self._costs.prefill_token_s)
        self._switch(version, arrived)
        self._go_on()
        return arrived

    def fail(self, *, restart_s: float) -> None:
        """Lose all rows; continue after `restart_s`, with the newest weights."""
        self._advance()
        for group in {row.group for row in self._rows} | {group for _, group, _ in self._waiting}:
            if not group.ended.done():
                group.ended.set_exception(EngineError("the virtual generator failed"))
        self._rows, self._begins = [], 0.0
        self._waiting.clear()
        self._at += restart_s
        self._go_on()

    def change_speed(self, factor: float) -> None:
        self._advance()
        self._speed *= factor
        self._go_on()

    @property
    def version(self) -> int:
        return self._loads[-1][1]

    @property
    def _num_cached(self) -> float:
        return len(self._rows) * (self._prompt_tokens + self._steps) - self._begins

    def _switch(self, version: int, arrived: asyncio.Future[None]) -> None:
        self._loads.append((self._steps, version))
        if not arrived.done():
            arrived.set_result(None)

    def _prefill(self, seconds: float) -> None:
        self._at += seconds / self._speed
        self.busy_s += seconds / self._speed

    def _go_on(self) -> None:
        self._advance()
        while self._rows and self._rows[0].end <= self._steps + 1e-6:
            self._end(heappop(self._rows))
        while self._draining and not self._rows:
            self._switch(*self._draining.pop(0))
        while self._waiting and len(self._rows) < self._costs.max_rows and not self._draining:
            length, group, member = self._waiting.popleft()
            if not group.ended.done():
                row = Row(self._steps + length, next(self._numbers), self._steps, group, member)
                heappush(self._rows, row)
                self._begins += self._steps
                self._prefill(self._prompt_tokens * self._costs.prefill_token_s)
        if self._timer:
            self._timer.cancel()
        if self._rows:
            seconds = self._seconds_of(self._rows[0].end - self._steps)
            self._timer = self._loop.call_at(
                max(self._at, self._loop.time()) + seconds, self._go_on
            )

    def _end(self, row: Row) -> None:
        group = row.group
        self._begins -= row.begin
        group.members[row.member] = self._spans(row)
        group.num_running -= 1
        if not group.num_running and not group.ended.done():
            group.ended.set_result(group.members)

    def _advance(self) -> None:
        now = self._loop.time()
        if now <= self._at:
            return
        if self._rows:
            steps = self._steps_in(now - self._at)
            self.busy_s += now - self._at
            self.num_tokens += steps * len(self._rows)
            self._steps += steps
        self._at = now

    def _rates(self) -> tuple[float, float]:
        """Return the time of the next decode step, and its growth per step."""
        first = self._costs.decode_s(len(self._rows), self._num_cached)
        return first / self._speed, len(self._rows) * self._costs.cached_token_s / self._speed

    def _seconds_of(self, steps: float) -> float:
        first, growth = self._rates()
        return max(0.0, steps * (first + growth * steps / 2))

    def _steps_in(self, seconds: float) -> float:
        first, growth = self._rates()
        return 2 * seconds / (first + sqrt(first * first + 2 * growth * seconds))

    def _spans(self, row: Row) -> Spans:
        first = bisect_right(self._loads, (row.begin, 1 << 62)) - 1
        starts = [row.begin, *(at for at, _ in self._loads[first + 1 :]), row.end]
        bounds = [round(min(at, row.end) - row.begin) for at in starts]
        versions = [version for _, version in self._loads[first:]]
        lengths = (end - begin for begin, end in pairwise(bounds))
        spans = zip(versions, lengths, strict=True)
        return tuple(VersionSpan(version, length) for version, length in spans if length)
