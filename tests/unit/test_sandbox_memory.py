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

from areal_flow.cluster import reward_tasks
from areal_flow.cluster.worker import WorkerContext
from areal_flow.config import build_recipe, dump_recipe
from areal_flow.core import machine
from areal_flow.core.layout import RunLayout
from areal_flow.sandboxes import pool
from areal_flow.sandboxes.pool import PROGRAM_MEMORY, ProgramMemory, SandboxPool
from areal_flow.sandboxes.run import Limits, Outcome, Program


class NoZygote:
    def __init__(self, *_: Any, **__: Any) -> None: ...


@pytest.fixture
def most_living(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Replace programs by short sleeps, and count how many run at a time."""
    living = max_living = 0
    lock = threading.Lock()

    def sleeping(
        _: Any, programs: Sequence[Program], __: Any, *, on_slow: Callable[[], None]
    ) -> list[Outcome]:
        nonlocal living, max_living
        on_slow()
        with lock:
            living += len(programs)
            max_living = max(max_living, living)
        time.sleep(0.01)
        with lock:
            living -= len(programs)
        return [Outcome()] * len(programs)

    monkeypatch.setattr(pool, "ZygoteClient", NoZygote)
    monkeypatch.setattr(pool, "usable_bytes", lambda: 8 * 2**30 + 5)
    monkeypatch.setattr(pool, "run_programs", sleeping)
    return lambda: max_living


@pytest.mark.parametrize(("num_programs", "max_living"), [(1, 4), (2, 4), (3, 3), (9, 9)])
def test_sleeping_programs_keep_their_memory(
    most_living: Callable[[], int], num_programs: int, max_living: int
) -> None:
    sandboxes = SandboxPool(Limits(memory_bytes=2**30), tier="namespaces")
    given = [Program("script", b"")] * num_programs
    with ThreadPoolExecutor(16) as threads:
        outcomes_by_run = [*threads.map(lambda _: sandboxes.run(lambda: given), range(16))]
    assert [len(outcomes) for outcomes in outcomes_by_run] == [num_programs] * 16
    assert most_living() == max_living


@pytest.mark.parametrize(("num_processes", "max_living"), [(1, 4), (2, 2), (3, 1), (8, 1)])
def test_two_pools_and_other_processes_share_the_memory(
    most_living: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
    num_processes: int,
    max_living: int,
) -> None:
    monkeypatch.setattr(PROGRAM_MEMORY, "num_processes", num_processes)
    pools = [SandboxPool(Limits(memory_bytes=2**30), tier="namespaces") for _ in range(2)]
    given = [Program("script", b"")]
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda n: pools[n % 2].run(lambda: given), range(16)))
    assert most_living() == max_living


def test_reward_worker_leaves_the_others_their_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layout = RunLayout(tmp_path)
    layout.config.write_text(
        dump_recipe(build_recipe({"cluster": {"num_reward_workers": 8}}, source="test"))
    )
    monkeypatch.setattr(PROGRAM_MEMORY, "num_processes", 1)
    monkeypatch.setattr(reward_tasks, "worker_context", lambda: WorkerContext(tmp_path, 1))
    assert reward_tasks.call_tool("math:sqrt", [(4,)]) == [2.0]
    assert PROGRAM_MEMORY.num_processes == 8


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
        assert ProgramMemory().budget_bytes == budget
