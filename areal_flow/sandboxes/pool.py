"""The sandboxes of a worker, in the strongest tier that passes its self-test.

Zygotes that die are replaced, and sleeping programs free a slot.

| a run waits for          | unblocked by                                                       |
|--------------------------|--------------------------------------------------------------------|
| memory for its processes | a run that ends; one that sleeps keeps its memory                  |
| a slot                   | a run that ends, or exceeds its processor time on the wall clock    |
| its processes            | their end, or their limits                                         |
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from areal_flow.core.machine import is_linux, system_name, usable_bytes, usable_cores
from areal_flow.sandboxes.inside import program
from areal_flow.sandboxes.run import (
    Limits,
    Outcome,
    Program,
    SandboxError,
    ZygoteClient,
    available_tiers,
    run_programs,
)

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
NO_TIER = (
    "model-written code is not run here: no sandbox passes its self-test ({reasons}). Expected "
    "Linux 5.13 or newer on x86_64 or aarch64 with seccomp, and user namespaces or Landlock: allow "
    "them (sysctl user.max_user_namespaces, the container's seccomp profile), or run reward "
    "workers where they are"
)
LOST = {
    "namespaces": "",
    "landlock": "without user namespaces programs have no /tmp, and can see names of files",
}
"""What a tier lacks, for messages."""
_CANARIES = """
import ctypes, json, os, socket, sys
def connect():
    socket.create_connection(("127.0.0.1", {port}), timeout=1).close()
def read_home():
    if not any(os.access(path, os.F_OK) and open(path, "rb") for path in {home!r}): raise OSError
def write():
    open({folder!r} + "/canary", "w").close()
def trace():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(0, 0, 0, 0) < 0: raise OSError
def spawn():
    if os.fork() == 0: os._exit(0)
canaries = dict(
    read_home=read_home,
    read_file=lambda: open({folder!r} + "/secret").read(),
    write_file=write,
    delete_file=lambda: os.unlink({folder!r} + "/secret"),
    read_environment=lambda: open("/proc/{owner}/environ", "rb").read(),
    see_processes=lambda: os.listdir("/proc"),
    signal_owner=lambda: os.kill({owner}, 0),
    open_socket=lambda: socket.socket(),
    connect=connect,
    fork=spawn,
    execute=lambda: os.execv(sys.executable or "/bin/true", ["true"]),
    trace=trace,
    become_root=lambda: os.setuid(0),
    change_mode=lambda: os.chmod("/usr/lib", 0o755),
)
can = []
for name, canary in canaries.items():
    try:
        canary()
    except OSError:
        continue
    except Exception as error:
        can.append(name + ": " + repr(error))
    else:
        can.append(name)
print(json.dumps(can))
"""


class ProgramMemory:
    """The memory of all programs of this process, whichever pool runs them."""

    def __init__(self) -> None:
        self.num_processes = 1
        """Processes on this machine that run programs; they share half of its memory equally."""
        self._used_bytes, self._ended = 0, threading.Condition()

    @property
    def budget_bytes(self) -> int:
        return usable_bytes() // 2 // self.num_processes

    @contextmanager
    def take(self, num_bytes: int) -> Iterator[None]:
        """Wait until this much is free; more than the whole budget is granted to a single run."""
        with self._ended:
            limit = self.budget_bytes - num_bytes
            self._ended.wait_for(lambda: not self._used_bytes or self._used_bytes <= limit)
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
        """Start a zygote per core, in a given tier, else in the strongest that passes."""
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
        """Run programs concurrently; `programs` makes them for each attempt.

        A run that exceeded its wall time but not its processor time is repeated once: the machine
        may be busy.
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
            attempt = programs()
            with PROGRAM_MEMORY.take(len(attempt) * self.limits.memory_bytes):
                zygote = self._next_zygote()
                with ExitStack() as slot:
                    slot.enter_context(self._slots)
                    try:
                        return run_programs(zygote, attempt, self.limits, on_slow=slot.close)
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


def choose_tier(tiers: tuple[str, ...] | None = None) -> str:
    """Return the strongest tier that passes its self-test, of those given or of all."""
    reasons = []
    for tier in available_tiers() if tiers is None else tiers:
        try:
            zygote = ZygoteClient(tier, modules=())
            try:
                check_tier(zygote)
            finally:
                zygote.close()
        except (SandboxError, OSError) as error:
            reasons.append(f"{tier}: {error}")
        else:
            return tier
    no_tiers = "none is allowed" if is_linux() else f"this is {system_name()}"
    raise SandboxError(NO_TIER.format(reasons="; ".join(reasons) or no_tiers))


def check_tier(zygote: ZygoteClient) -> None:
    """Run a program that tries all that is forbidden; raise if it cannot run, or if it succeeds."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        Path(folder).chmod(0o777)
        (Path(folder) / "secret").write_text("secret")
        home = [str(path) for path in Path.home().iterdir() if path.is_file()]
        source = _CANARIES.format(
            port=server.getsockname()[1], folder=folder, home=home[:9], owner=os.getpid()
        )
        (result,) = run_programs(
            zygote, [Program(program.SCRIPT, source.encode())], Limits(cpu_s=10)
        )
        if result.exit_code or result.timed_out:
            errors = result.stderr.decode(errors="replace").strip().splitlines()
            raise SandboxError(
                f"a program does not run: {errors[-1] if errors else result.exit_code}"
            )
        if can := json.loads(result.stdout):
            raise SandboxError(f"a program can do what it must not: {', '.join(can)}")
        if not (Path(folder) / "secret").exists():
            raise SandboxError("a program can delete files")
