"""Programs that run at the same time fit into the memory, whether they compute or sleep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_flow import machine
from areal_flow.rewards.sandbox import pool
from areal_flow.rewards.sandbox.limits import Limits
from areal_flow.rewards.sandbox.pool import SandboxPool, memory_budget
from areal_flow.rewards.sandbox.run import Outcome, Program


class NoZygote:
    def __init__(self, *_: Any, **__: Any) -> None: ...


@pytest.mark.parametrize(("num_programs", "most"), [(1, 4), (2, 4), (3, 3), (9, 9)])
def test_sleeping_programs_keep_their_memory(
    monkeypatch: pytest.MonkeyPatch, num_programs: int, most: int
) -> None:
    living = most_living = 0
    lock = threading.Lock()

    def sleeping(
        _: Any, programs: Sequence[Program], __: Any, *, on_slow: Callable[[], None]
    ) -> list[Outcome]:
        nonlocal living, most_living
        on_slow()
        with lock:
            living += len(programs)
            most_living = max(most_living, living)
        time.sleep(0.01)
        with lock:
            living -= len(programs)
        return [Outcome()] * len(programs)

    monkeypatch.setattr(pool, "ZygoteClient", NoZygote)
    monkeypatch.setattr(pool, "memory_budget", lambda: 4 * 2**30 + 5)
    monkeypatch.setattr(pool, "run_programs", sleeping)
    sandboxes = SandboxPool(Limits(memory_bytes=2**30), tier="namespaces")
    given = [Program("script", b"")] * num_programs
    with ThreadPoolExecutor(16) as threads:
        found = [*threads.map(lambda _: sandboxes.run(lambda: given), range(16))]
    assert [len(outcomes) for outcomes in found] == [num_programs] * 16
    assert most_living == most


def test_budget_is_half_of_what_machine_and_container_allow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    total = psutil.virtual_memory().total
    limited, unlimited = tmp_path / "limited", tmp_path / "unlimited"
    limited.write_text("1000000\n")
    unlimited.write_text("max\n")
    for files, budget in (
        ((limited, unlimited), 500_000),
        ((unlimited, tmp_path / "none"), total // 2),
    ):
        monkeypatch.setattr(machine, "CGROUP_LIMITS", files)
        assert memory_budget() == budget
