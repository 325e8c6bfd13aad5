"""Workers that are forks of a fork server: they start, die and end as all workers do."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from areal_flow.cluster.launchers.child import Child
from areal_flow.cluster.launchers.fork_server import ForkServer, start_fork_server
from areal_flow.cluster.placement import WorkerPlacement, worker_environment
from areal_flow.config.cluster import ClusterSettings
from areal_flow.core.machine import is_linux
from tests.contracts.test_launchers import (
    check_worker_ends_with,
    client_of,
    empty_pool,
    gone,
    process_of,
    run,
    third_process,
)

pytestmark = pytest.mark.skipif(not is_linux(), reason="needs Linux's parent-death signals")

Started = tuple[ForkServer, psutil.Process]
PLACEMENT = WorkerPlacement("generator-0", "generator", 2, worker_environment(1))


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


@pytest.fixture(scope="module")
def fork_server() -> Iterator[Started]:
    before = children()
    with start_fork_server([PLACEMENT]) as fork_server:
        (process,) = children() - before
        yield fork_server, process
    assert children() <= before


def test_fork_runs_tasks_in_its_environment_until_it_is_stopped(fork_server: Started) -> None:
    async def live() -> None:
        async with empty_pool(ClusterSettings(), fork_server[0]) as pool:
            await pool.start_until_joined([PLACEMENT])
            process = await process_of(pool)
            assert (process.ppid(), process.name()) == (fork_server[1].pid, PLACEMENT.name)
            async with client_of(pool) as client:
                threads = await client.submit(os.getenv, "OMP_NUM_THREADS")
                group = await client.submit(os.getpgrp)
                has_torch = await client.submit(lambda: "torch" in sys.modules)
            assert (threads, group, has_torch) == ("1", process.pid, True)
            (record,) = pool.registry.all()
            assert pool.pid(record) == process.pid
            await pool.stop()
            assert not process.is_running()
            assert record.deaths == []

    run(live)


def test_killed_and_stopped_forks_are_noticed_and_forked_again(fork_server: Started) -> None:
    async def die_twice() -> None:
        async with empty_pool(ClusterSettings(), fork_server[0]) as pool:
            third = await third_process(pool, PLACEMENT)
            assert third.ppid() == fork_server[1].pid
        await gone(third)

    run(die_twice)


def test_workers_of_a_killed_fork_server_end_and_start_without_it() -> None:
    async def lose() -> None:
        before = children()
        with start_fork_server([PLACEMENT]) as fork_server:
            (process,) = children() - before
            async with empty_pool(ClusterSettings(), fork_server) as pool:
                await pool.start_until_joined([PLACEMENT])
                first = await process_of(pool)
                process.send_signal(signal.SIGKILL)
                second = await process_of(pool, other_than=first.pid)
                assert second.ppid() == os.getpid()
                (record,) = pool.registry.all()
                assert [death.cause for death in record.deaths] == ["killed by signal 9"]

    run(lose)


def test_failed_fork_is_described_by_its_exit_status_and_last_output(
    fork_server: Started,
) -> None:
    async def fail() -> None:
        process = await fork_server[0].fork(PLACEMENT, '{"name": "generator-0"}')
        assert process is not None
        child = Child(process, "generator-0")
        await child.ended.wait()
        assert process.returncode == 1
        assert b"TypeError" in child.last_output
        child.close()

    run(fail)


FAILS_ONCE = """
import os, socket, sys
import numpy as np
from areal_flow.cluster.launchers.fork_server import fork_for_requests
fork = os.fork
def refuse():
    os.fork = fork
    raise BlockingIOError("no process is left")
os.fork = refuse
fork_for_requests(socket.socket(fileno=sys.stdin.fileno()))
print(np.random.random(), flush=True)
"""


def test_failed_fork_ends_no_other_and_forks_draw_different_numbers() -> None:
    async def draw() -> tuple[float, float]:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        fork_server = ForkServer()
        fork_server._requests, fork_server._environment = ours, PLACEMENT.environment
        with theirs:
            command = [sys.executable, "-c", FAILS_ONCE]
            fork_server._process = subprocess.Popen(command, stdin=theirs.fileno())
        try:
            failed, *forks = [await fork_server.fork(PLACEMENT, "{}") for _ in range(3)]
            assert failed is None
            first, second = (float(fork.stdout.read()) for fork in forks if fork is not None)
            return first, second
        finally:
            fork_server.close()

    first, second = asyncio.run(asyncio.wait_for(draw(), 20))
    assert first != second


@pytest.mark.parametrize(
    "changes",
    [{"environment": worker_environment(2)}, {"num_gpus": 1}, {"host": "me@10.0.0.7"}],
)
def test_other_environments_gpus_and_hosts_are_not_forked(
    fork_server: Started, changes: dict[str, object]
) -> None:
    placement = replace(PLACEMENT, **changes)  # type: ignore[arg-type]

    async def refuse() -> None:
        assert await fork_server[0].fork(placement, "{}") is None

    run(refuse)


@pytest.mark.parametrize("changes", [{"role": "reward"}, {"num_gpus": 1}, {"host": "me@10.0.0.7"}])
def test_fork_server_starts_only_if_it_is_useful(changes: dict[str, object]) -> None:
    before = children()
    with start_fork_server([replace(PLACEMENT, **changes)]):  # type: ignore[arg-type]
        assert children() == before


DRIVER = """
import asyncio
from areal_flow.cluster.launchers.fork_server import start_fork_server
from areal_flow.config.cluster import ClusterSettings
from tests.contracts.test_fork_server import PLACEMENT, empty_pool, process_of

async def live(fork_server):
    async with empty_pool(ClusterSettings(), fork_server) as pool:
        await pool.start_until_joined([PLACEMENT])
        print((await process_of(pool)).pid, flush=True)
        await asyncio.sleep(600)

with start_fork_server([PLACEMENT]) as fork_server:
    asyncio.run(live(fork_server))
"""


def test_fork_ends_with_its_driver_even_if_it_hangs() -> None:
    check_worker_ends_with(DRIVER)
