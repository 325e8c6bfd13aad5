"""Processes that do algebra: started on demand, killed if they take too long.

A request waits for a free process, and then for its reply, which comes within the limits of a
request.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from areal_flow.core.errors import RewardError
from areal_flow.core.machine import usable_cores
from areal_flow.core.types import Verdict

START_S = 60.0
"""Time limit; it usually takes a second."""
GRACE_S = 2.0
"""A process that exceeds its own limits by this time is killed."""
MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class MathLimits:
    """Limits of one request."""

    cpu_s: float = 2.0
    wall_s: float = 6.0
    """Larger than `cpu_s`, since the machine is shared."""
    memory_bytes: int = 2**30
    """Address space, including Python and sympy."""


class MathPoolError(RewardError):
    """No process can reply: an error of the infrastructure, never a verdict."""


class MathPool:
    """Compares answers by algebra in up to `num_processes` processes, by default one per core.

    They end when the pool is closed or garbage-collected.
    """

    def __init__(self, num_processes: int = 0, *, limits: MathLimits | None = None) -> None:
        self.limits = limits or MathLimits()
        num = num_processes or usable_cores()
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._threads = ThreadPoolExecutor(num, thread_name_prefix="algebra")
        self._close = weakref.finalize(self, _close_all, self._workers)

    def ask(self, answer: str | None, reference: str) -> tuple[Verdict, str]:
        """Return the verdict on an answer, or without one on the reference, and the reason."""
        return self._threads.submit(self._ask, answer, reference).result()

    def _ask(self, answer: str | None, reference: str) -> tuple[Verdict, str]:
        for _ in range(MAX_ATTEMPTS):
            worker = None
            try:
                worker = self._idle.pop() if self._idle else self._start()
                return worker.ask(answer, reference)
            except MathPoolError as error:
                reason = error
            except TimeoutError as error:
                return "timeout", str(error)
            finally:
                if worker is not None:
                    self._take_back(worker)
        raise MathPoolError(f"{MAX_ATTEMPTS} processes for algebra failed: {reason}")

    def close(self) -> None:
        self._threads.shutdown()
        self._close()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self._workers)

    def _start(self) -> _Worker:
        worker = _Worker(self.limits)
        self._workers.add(worker)
        return worker

    def _take_back(self, worker: _Worker) -> None:
        if worker.is_usable:
            self._idle.append(worker)
        else:
            self._workers.discard(worker)
            worker.close()


def _close_all(workers: set[_Worker]) -> None:
    while workers:
        workers.pop().close()


class _Worker:
    """A process of `worker`, with the forks that compute for it."""

    def __init__(self, limits: MathLimits) -> None:
        self._limits, self._num_requests = limits, 0
        self.is_usable = True
        arguments = map(str, (limits.cpu_s, limits.wall_s, limits.memory_bytes))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "areal_flow.rewards.math.worker", *arguments],
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        self.pid = self._process.pid
        try:
            self._reply(0, START_S)
        except (MathPoolError, TimeoutError) as error:
            self.close()
            raise MathPoolError(
                f"a process for algebra does not start ({error}): try "
                f"{sys.executable} -c 'import math_verify'"
            ) from None

    def ask(self, answer: str | None, reference: str) -> tuple[Verdict, str]:
        """Return the verdict; after an error the process is no longer usable."""
        self._num_requests += 1
        request = {"number": self._num_requests, "answer": answer, "reference": reference}
        assert self._process.stdin is not None
        self.is_usable = False
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise MathPoolError(f"a process for algebra is gone: {error}") from None
        reply = self._reply(self._num_requests, self._limits.wall_s + GRACE_S)
        if reply["verdict"] == "infrastructure_error":
            raise MathPoolError(f"a process for algebra: {reply['detail']}")
        self.is_usable = True
        return reply["verdict"], reply["detail"]

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _reply(self, number: int, limit_s: float) -> dict[str, Any]:
        """Return the reply with this number; lower numbers belong to earlier requests."""
        assert self._process.stdout is not None
        deadline = monotonic() + limit_s
        output = select.poll()  # `select.select` takes only descriptors below 1,024
        output.register(self._process.stdout, select.POLLIN)
        while output.poll(1000 * max(0.0, deadline - monotonic())):
            line = self._process.stdout.readline()
            if not line:
                raise MathPoolError("it ended")
            reply: dict[str, Any] = json.loads(line)
            if reply["number"] == number:
                return reply
        raise TimeoutError(f"no answer within {limit_s:g} s")
