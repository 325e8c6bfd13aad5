"""The sandboxes of a worker; zygotes that die are replaced, and sleeping programs free a slot.

| a run waits for          | unblocked by                                                       |
|--------------------------|--------------------------------------------------------------------|
| memory for its processes | a run that ends; one that sleeps keeps its memory                  |
| a slot                   | a run that ends, or lasts longer than it may compute, and so waits |
| its processes            | their end, or their limits                                         |
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from areal_flow.core.machine import usable_bytes, usable_cores
from areal_flow.rewards.code.sandbox.limits import Limits, SandboxError
from areal_flow.rewards.code.sandbox.run import Outcome, Program, run_programs
from areal_flow.rewards.code.sandbox.self_test import LOST, choose_tier
from areal_flow.rewards.code.sandbox.zygote_client import ZygoteClient

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3


class ProgramMemory:
    """The memory of all programs of this process, whichever pool runs them."""

    def __init__(self) -> None:
        self.num_processes = 1
        """How many on this machine run programs: they share half of its memory equally."""
        self._used_bytes, self._ended = 0, threading.Condition()

    @property
    def budget_bytes(self) -> int:
        return usable_bytes() // 2 // self.num_processes

    @contextmanager
    def take(self, num_bytes: int) -> Iterator[None]:
        """Wait until so much is free; what is more than the whole budget is taken alone."""
        with self._ended:
            others = self.budget_bytes - num_bytes
            self._ended.wait_for(lambda: not self._used_bytes or self._used_bytes <= others)
            self._used_bytes += num_bytes
        try:
            yield
        finally:
            with self._ended:
                self._used_bytes -= num_bytes
                self._ended.notify_all()


PROGRAM_MEMORY = ProgramMemory()


class SandboxPool:
    def __init__(
        self,
        limits: Limits | None = None,
        *,
        tier: str | None = None,
        modules: Sequence[str] = ("numpy",),
    ) -> None:
        """Start a zygote a core, in a tier that is known to pass, else the strongest that does."""
        self.limits = limits or Limits()
        self.tier = tier or choose_tier()
        num_cores = usable_cores()
        self._modules = modules
        self._zygotes = [ZygoteClient(self.tier, modules=modules) for _ in range(num_cores)]
        self._slots = threading.BoundedSemaphore(2 * num_cores)
        self._lock = threading.Lock()
        self._num_runs = 0
        if lost := LOST[self.tier]:
            logger.warning("model-written code runs in tier %s: %s", self.tier, lost)

    def run(self, programs: Callable[[], Sequence[Program]]) -> list[Outcome]:
        """Run programs side by side, made anew for each attempt.

        What lasted too long without computing too much runs once more: the machine may be busy.
        """
        outcomes = self._run(programs)
        if any(outcome.timed_out == "wall" for outcome in outcomes):
            outcomes = self._run(programs)
        return outcomes

    def close(self) -> None:
        for zygote in self._zygotes:
            zygote.close()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(zygote.pid for zygote in self._zygotes)

    def _run(self, programs: Callable[[], Sequence[Program]]) -> list[Outcome]:
        reasons: list[str] = []
        while len(reasons) < MAX_ATTEMPTS:
            given = programs()
            with PROGRAM_MEMORY.take(len(given) * self.limits.memory_bytes):
                zygote = self._next_zygote()
                with ExitStack() as slot:
                    slot.enter_context(self._slots)
                    try:
                        return run_programs(zygote, given, self.limits, on_slow=slot.close)
                    except SandboxError as error:
                        reasons.append(str(error))
                        self._replace(zygote)
        raise SandboxError(f"sandboxes died {MAX_ATTEMPTS} times over one program: {reasons[-1]}")

    def _next_zygote(self) -> ZygoteClient:
        with self._lock:
            self._num_runs += 1
            return self._zygotes[self._num_runs % len(self._zygotes)]

    def _replace(self, zygote: ZygoteClient) -> None:
        with self._lock:
            if zygote in self._zygotes:
                logger.warning("a sandbox's zygote is replaced")
                place = self._zygotes.index(zygote)
                self._zygotes[place] = ZygoteClient(self.tier, modules=self._modules)
                zygote.close()
