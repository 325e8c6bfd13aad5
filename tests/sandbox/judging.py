"""Judges programs of the corpus in a pool, with a secret that they may attack."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from areal_flow.rewards.code.reward import Judgement, grade
from areal_flow.rewards.code.rows import CodeTask
from areal_flow.sandboxes.pool import SandboxPool
from areal_flow.sandboxes.run import Limits
from tests.sandbox.corpus import Case

LIMITS = Limits(cpu_s=0.4, memory_bytes=640 * 2**20, wall_per_cpu=6.0)
ASSERTS = """
import math
def check(candidate):
    assert candidate(1, 2) == 3
    assert abs(candidate(40, 2) - 42) < 1e-6
    assert isinstance(candidate(5, 5), int)
    assert all(found > 0 for found in map(candidate, [1, 2], [3, 4]))
"""
CASES = """
import unittest
class TestAdd(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(add(1, 2), 3)
    def test_no_number(self):
        with self.assertRaises(ValueError):
            add(None, 1)
"""


@dataclass(frozen=True)
class Surroundings:
    """What a program might steal or reach."""

    folder: Path
    secret: str
    port: int
    socket_name: str

    def fill(self, source: str) -> str:
        """Fill in the paths and addresses that a program attacks."""
        values = {
            "SECRET_FILE": str(self.folder / "secret"), "FOLDER": str(self.folder),
            "PORT": str(self.port), "OWNER": str(os.getpid()), "SOCKET": self.socket_name,
            "SECRET": self.secret,
        }  # fmt: skip
        for name, value in values.items():
            source = source.replace(name, value)
        return source

    def escapes(self) -> list[str]:
        """Return what changed in the surroundings."""
        secret = self.folder / "secret"
        names = sorted(path.name for path in self.folder.iterdir())
        is_whole = secret.is_file() and secret.read_text() == self.secret
        return [*([] if is_whole else ["secret changed"]), *(n for n in names if n != "secret")]


@contextmanager
def surroundings(folder: Path) -> Iterator[Surroundings]:
    """Create a secret and listening sockets."""
    secret = f"secret-{os.urandom(8).hex()}"
    folder.chmod(0o777)
    (folder / "secret").write_text(secret)
    name = f"abstract-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(f"\0{name}")
        listener.listen()
        yield Surroundings(folder, secret, server.getsockname()[1], name)


def task_of(case: Case, around: Surroundings) -> CodeTask:
    """Return how a case is graded."""
    source = around.fill(case.source)
    if case.mode in ("stdin", "steal"):
        sums = [("1 2\n", "3"), ("40 2\n", "42")]
        tests = [("1 2\n", around.secret)] if case.mode == "steal" else sums
        return CodeTask(source, "stdin", tests)
    if case.mode == "call":
        return CodeTask(source, "call", [([1, 2], 3), ([40, 2], 42)], entry_point="add")
    tests = ASSERTS if case.mode == "assert" else CASES
    return CodeTask(source, "assert", test_source=tests, entry_point="add", borrowed=("add",))


def runs_here(case: Case) -> bool:
    """Return whether a program has system call numbers of this machine."""
    return "syscall(" not in case.source or platform.machine() == "x86_64"


def judge(
    pool: SandboxPool, cases: Sequence[Case], around: Surroundings, *, num_threads: int = 8
) -> list[Judgement]:
    """Grade programs, several at a time."""
    with ThreadPoolExecutor(num_threads) as threads:
        return [*threads.map(lambda case: grade(pool, task_of(case, around)), cases)]


def living_below(pool: SandboxPool) -> list[int]:
    """Return the processes below a pool's zygotes, but those that zygotes are made of."""
    alive: list[int] = []
    for pid in pool.pids:
        below = psutil.Process(pid).children(recursive=True)
        alive += [p.pid for p in below if pool.tier == "landlock" or p.ppid() != pid]
    return alive
