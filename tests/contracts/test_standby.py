"""Worker processes that are started before there is a scheduler: taken by a launcher, or killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from distributed import Scheduler

from areal_flow.cluster.executions import Executions
from areal_flow.cluster.launchers import make_launcher
from areal_flow.cluster.launchers.standby import StandbyWorkers, standing_by
from areal_flow.cluster.placement import Machines, WorkerPlacement, worker_environment
from areal_flow.cluster.pool import WorkerPool
from areal_flow.cluster.settings import ClusterSettings

HOST = "127.0.0.1"
LIMIT_S = 60.0
PLACEMENT = WorkerPlacement("reward-0", "reward", 1, worker_environment(1))


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


async def joined(standby: StandbyWorkers) -> int:
    """Have a pool start `PLACEMENT` and end it; return the number of its process."""
    async with Scheduler(host=HOST, port=0, dashboard_address=f"{HOST}:0") as scheduler:
        launcher = make_launcher(scheduler.address, ClusterSettings(), standby)
        pool = WorkerPool(scheduler, launcher, Machines(), Executions(Path("nowhere")))
        try:
            await pool.start_until_joined([PLACEMENT])
            (worker,) = scheduler.workers.values()
            return int(worker.pid)
        finally:
            await pool.stop()


@pytest.mark.parametrize("dies", [False, True])
def test_worker_that_stands_by_is_taken_unless_it_died(dies: bool) -> None:
    before = children()
    with standing_by([PLACEMENT]) as standby:
        (process,) = children() - before
        if dies:
            process.send_signal(signal.SIGKILL)
            psutil.wait_procs([process], timeout=LIMIT_S)
        pid = asyncio.run(asyncio.wait_for(joined(standby), LIMIT_S))
        assert (pid == process.pid) is not dies
    assert children() <= before


def test_nobody_takes_a_worker_of_another_placement_and_it_is_killed() -> None:
    before = children()
    with standing_by([PLACEMENT]) as standby:
        other = WorkerPlacement("reward-0", "reward", 1, worker_environment(2))
        assert standby.take(other, "{}") is None
        assert len(children() - before) == 1
    assert children() <= before


def test_worker_of_another_machine_does_not_stand_by_here() -> None:
    before = children()
    with standing_by([WorkerPlacement("reward-0", "reward", 1, host="me@10.0.0.7")]):
        assert children() == before


DRIVER = """
import sys
from tests.contracts.test_standby import PLACEMENT, children, standing_by
with standing_by([PLACEMENT]):
    (worker,) = children()
    print(worker.pid, flush=True)
    sys.stdin.read()
"""


def test_worker_that_stands_by_ends_with_its_driver() -> None:
    command = [sys.executable, "-c", DRIVER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=Path.cwd()) as driver:
        assert driver.stdout is not None
        worker = psutil.Process(int(driver.stdout.readline()))
        os.kill(driver.pid, signal.SIGKILL)
    assert not psutil.wait_procs([worker], timeout=LIMIT_S)[1]
