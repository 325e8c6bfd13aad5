"""The third tier: a pool of containers elsewhere, by SandboxFusion's protocol (`POST /run_code`).

A run is one process there, and gets inputs only; what it printed or returned is compared here. So
tests that are code are not run: they would share a container with the program that they judge.
"""

from __future__ import annotations

import json
import math
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from areal_flow.rewards.retries import TRANSIENT_STATUSES, wait_s
from areal_flow.rewards.sandbox.inside import plain, program
from areal_flow.rewards.sandbox.limits import Limits, SandboxError
from areal_flow.rewards.sandbox.run import Outcome, Program

MAX_ATTEMPTS = 3
QUEUE_S = 60.0
"""How long a program may wait in the pool before it runs; then the pool has failed."""
_UNREADABLE = (OSError, HTTPException, ValueError, TypeError, LookupError, AttributeError)
_CPU_SIGNALS = (-signal.SIGXCPU, 128 + signal.SIGXCPU)
_SENT = ("plain", "program", "lending", "container")
_START = """
import sys, types
package = sys.modules["inside"] = types.ModuleType("inside")
for name, text in {sources!r}.items():
    module = sys.modules["inside." + name] = types.ModuleType("inside." + name)
    module.__package__ = "inside"
    setattr(package, name, module)
    exec(compile(text, name, "exec"), module.__dict__)
sys.modules["inside.container"].main({request!r})
"""
_SPEAKS = """
import os, sys, tempfile
print(input()[::-1])
print({said!r}, file=sys.stderr)
open(os.path.join(tempfile.gettempdir(), {left!r}), "w").close()
sys.exit(7)
"""
_LOOKS = """
import os, tempfile
print(os.path.exists(os.path.join(tempfile.gettempdir(), {left!r})))
"""


class ContainerPool:
    """Runs programs in containers, in threads of its callers, who say how many at a time."""

    tier = "containers"
    modes = ("stdin", "call")

    def __init__(self, url: str, limits: Limits | None = None) -> None:
        """Take where the pool is: `http(s)://...`, without `/run_code`."""
        self.limits = limits or Limits()
        self._url = urlsplit(url.rstrip("/") + "/run_code")

    def run(self, programs: Callable[[], Sequence[Program]]) -> list[Outcome]:
        """Run a program; once more if it lasted too long: the pool may be busy.

        Raises:
            SandboxError: the pool gives no outcome, or several programs are to run side by side.
        """
        outcome = self._run(programs)
        if outcome.timed_out == "wall":
            outcome = self._run(programs)
        return [outcome]

    def close(self) -> None: ...

    def check(self) -> None:
        """Hold the pool to what grading needs of it.

        Raises:
            SandboxError: it cannot be asked, or what it says is not what a program did.
        """
        asked, said, left = (secrets.token_hex(8) for _ in range(3))
        source = _SPEAKS.format(said=said, left=f"areal-flow-{left}")
        found = self._only(program.SCRIPT, source, stdin=asked)
        if found.stdout != f"{asked[::-1]}\n".encode() or said.encode() not in found.stderr:
            raise SandboxError("what a program prints does not come back as it was printed")
        if found.exit_code != 7:
            raise SandboxError(f"a program's exit code: expected 7, found {found.exit_code}")
        found = self._only(program.SCRIPT, _LOOKS.format(left=f"areal-flow-{left}"))
        if found.stdout != b"False\n":
            raise SandboxError(
                "a program sees files of the one before it, whose answers it could keep for the "
                "next: isolate each run (SandboxFusion: sandbox.isolation = 'lite')"
            )
        lender = f"def f(x):\n    print({said!r})\n    return x\n"
        call: dict[str, Any] = {"of": None, "name": "f", "args": [asked], "kwargs": {}}
        found = self._only(program.LEND, lender, others=(json.dumps(call).encode(), None))
        if found.answer.splitlines()[1:] != [json.dumps({"value": asked}).encode()]:
            raise SandboxError(f"a function's result does not come back: {_last_line(found)}")
        impatient = ContainerPool(self._url.geturl().removesuffix("/run_code"), _SHORT)
        if impatient._only(program.SCRIPT, "import time\ntime.sleep(60)").timed_out != "wall":
            raise SandboxError("a program that lasts too long is not ended")

    def _only(self, mode: str, source: str, *, stdin: str = "", others: Any = ()) -> Outcome:
        return self._run(lambda: [Program(mode, source.encode(), stdin.encode(), others)])

    def _run(self, programs: Callable[[], Sequence[Program]]) -> Outcome:
        (asked,) = programs()
        limits, failure = self.limits, ""
        body = json.dumps(
            {
                "code": _code(asked, limits),
                "language": "python",
                "run_timeout": limits.wall_s,
                "memory_limit_MB": -(-limits.memory_bytes // 2**20),
            }
        ).encode()
        for attempt in range(MAX_ATTEMPTS):
            time.sleep(wait_s(attempt))
            try:
                return self._outcome(self._ask(body), asked.mode)
            except _Refused as refused:
                failure = str(refused)
                if not refused.is_transient:
                    break
            except _UNREADABLE as error:
                failure = f"{type(error).__name__}: {error}"
        raise SandboxError(f"containers at {self._url.geturl()}: {failure}")

    def _ask(self, body: bytes) -> Mapping[str, Any] | None:
        """Return what the pool says; None if that is too long.

        Raises:
            _Refused: it answers with another status than 200, or not at all.
        """
        until = time.monotonic() + self.limits.wall_s + QUEUE_S
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        connection = kind(self._url.netloc, timeout=until - time.monotonic())
        try:
            connection.request("POST", self._url.path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = _read(response, 16 * self.limits.output_bytes + 2**20, until)
        finally:
            connection.close()
        if response.status != 200:
            said = (content or b"")[:200].decode(errors="replace")
            raise _Refused(
                f"status {response.status}: {said}", response.status in TRANSIENT_STATUSES
            )
        if content is None:
            return None
        found = plain.parse(content)
        if found["status"] == "SandboxError":
            raise _Refused(f"its sandbox failed: {str(found.get('message'))[:200]}", True)
        return dict(found)

    def _outcome(self, found: Mapping[str, Any] | None, mode: str) -> Outcome:
        if found is None:
            return Outcome(is_output_over=True)
        result = found["run_result"]
        if result["status"] == "TimeLimitExceeded":
            return Outcome(timed_out="wall")
        if result["status"] != "Finished":
            raise ValueError(f"status {result['status']!r:.40} of a run")
        stdout, stderr = (result[name].encode(errors="replace") for name in ("stdout", "stderr"))
        outcome = Outcome(int(result["return_code"]), stderr=stderr)
        outcome.timed_out = "cpu" if outcome.exit_code in _CPU_SIGNALS else ""
        outcome.is_output_over = len(stdout) > self.limits.output_bytes
        if mode == program.LEND:
            outcome.answer = stdout
        else:
            outcome.stdout = stdout
        return outcome


_SHORT = Limits(cpu_s=0.5, wall_per_cpu=1.0)


class _Refused(Exception):
    """The pool gave no outcome."""

    def __init__(self, reason: str, is_transient: bool) -> None:
        super().__init__(reason)
        self.is_transient = is_transient


def _code(asked: Program, limits: Limits) -> str:
    """Return a run as one source, all ASCII, that needs nothing but Python 3.9."""
    request = {
        "mode": asked.mode,
        "source": asked.source,
        "stdin": asked.stdin,
        "calls": asked.others[0] if asked.others else b"",
        "cpu_s": math.ceil(limits.cpu_s),
        "memory_bytes": limits.memory_bytes,
    }
    return _START.format(sources=_sources(), request=request)


@cache
def _sources() -> dict[str, str]:
    inside = Path(plain.__file__).parent
    return {name: (inside / f"{name}.py").read_text() for name in _SENT}


def _read(response: HTTPResponse, limit: int, until: float) -> bytes | None:
    """Return a body; None if it is longer than a limit.

    Raises:
        TimeoutError: it does not end in time.
    """
    content = bytearray()
    while chunk := response.read1(1 << 16):
        content += chunk
        if len(content) > limit:
            return None
        if time.monotonic() > until:
            raise TimeoutError("its answer does not end")
    return bytes(content)


def _last_line(outcome: Outcome) -> str:
    said = outcome.stderr.decode(errors="replace").strip().splitlines()
    return said[-1] if said else f"exit code {outcome.exit_code}"
