"""The contract of every launcher: workers start, stop, die, restart, and outlive no driver."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest
from distributed import Client, Scheduler

from areal_flow.cluster.certificates import connection_security, with_certificates
from areal_flow.cluster.launchers import LAUNCHERS, make_launcher
from areal_flow.cluster.launchers.fork_server import ForkServer
from areal_flow.cluster.placement import (
    WorkerPlacement,
    machines_of,
    place_beside,
    worker_environment,
)
from areal_flow.cluster.pool import WorkerPool
from areal_flow.cluster.registry import Executions
from areal_flow.config.cluster import ClusterSettings, KubernetesSettings, RemoteSettings
from areal_flow.core.errors import EngineError
from tests.kubernetes_api import IMAGE, running_kubernetes
from tests.slurmd import allocation, running_slurm
from tests.sshd import HOST, running_sshd

LIMIT_S = 60.0


QUICK = ("local", "ssh")


@pytest.fixture(
    scope="module",
    params=[
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(LAUNCHERS)
    ],
)
def settings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterSettings]:
    if request.param == "local":
        yield ClusterSettings()
        return
    if request.param == "slurm":
        with running_slurm(tmp_path_factory.mktemp("slurm")):
            yield ClusterSettings(launcher="slurm")
        return
    if request.param == "srun":
        with running_slurm(tmp_path_factory.mktemp("slurm")), allocation():
            yield ClusterSettings(launcher="srun")
        return
    if request.param == "kubernetes":
        with running_kubernetes(tmp_path_factory.mktemp("kubernetes")):
            own = KubernetesSettings(image=IMAGE)
            yield ClusterSettings(launcher="kubernetes", kubernetes=own)
        return
    with running_sshd(tmp_path_factory.mktemp("sshd")) as options:
        remote = RemoteSettings(hosts=(HOST,), ssh_options=options)
        yield ClusterSettings(launcher=request.param, remote=remote)


def generator(settings: ClusterSettings, **environment: str) -> WorkerPlacement:
    variables = worker_environment(1) | environment
    placement = WorkerPlacement("generator-0", "generator", 2, variables)
    return place_beside(placement, [], machines_of(settings))


@asynccontextmanager
async def empty_pool(
    settings: ClusterSettings, fork_server: ForkServer | None = None
) -> AsyncIterator[WorkerPool]:
    with TemporaryDirectory() as folder:
        network = with_certificates(settings.network, Path(folder))
        settings = settings.model_copy(update={"network": network})
        security = connection_security(network)
        listen = {"host": HOST, "port": 0, "dashboard_address": f"{HOST}:0", "security": security}
        async with Scheduler(**listen) as scheduler:
            logs = Path(os.environ.get("SLURM_CONF") or os.environ.get("KUBECONFIG", "nowhere"))
            launcher = make_launcher(scheduler.address, settings, fork_server, logs.parent)
            executions = Executions(Path("nowhere"))
            pool = WorkerPool(scheduler, launcher, machines_of(settings), executions)
            try:
                yield pool
            finally:
                await pool.stop()


def client_of(pool: WorkerPool) -> Client:
    scheduler = pool.scheduler
    return Client(scheduler.address, asynchronous=True, security=scheduler.security)


async def process_of(pool: WorkerPool, *, other_than: int = 0) -> psutil.Process:
    """Wait for the only worker to register with a new process and return that process."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            pids = [worker.pid for worker in pool.scheduler.workers.values()]
            if pids and pids[0] != other_than:
                return psutil.Process(pids[0])
            await asyncio.sleep(0.02)


async def gone(*processes: psutil.Process) -> None:
    async with asyncio.timeout(LIMIT_S):
        while any(process.is_running() for process in processes):
            await asyncio.sleep(0.02)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 3 * LIMIT_S))


def test_worker_runs_tasks_in_its_environment_until_it_is_stopped(
    settings: ClusterSettings,
) -> None:
    async def live() -> None:
        async with empty_pool(settings) as pool:
            await pool.start_until_joined([generator(settings, AREAL_FLOW_TEST="a b'c")])
            process = await process_of(pool)
            async with client_of(pool) as client:
                received = await client.submit(
                    os.getenv, "AREAL_FLOW_TEST", resources={"generator": 2}
                )
                threads = await client.submit(os.getenv, "OMP_NUM_THREADS")
                group = await client.submit(os.getpgrp)
            assert (received, threads) == ("a b'c", "1")
            assert group != os.getpgrp()
            (record,) = pool.registry.all()
            assert pool.pid(record) in (None, process.pid)
            port = pool.scheduler.workers[record.address].services["dashboard"]
            with pytest.raises(HTTPError, match="404"):
                await asyncio.to_thread(urlopen, f"http://127.0.0.1:{port}/metrics")
            await pool.stop()
            assert not process.is_running()
            assert record.deaths == []
            assert pool.pid(record) is None

    run(live)


def test_file_of_the_working_directory_is_imported_and_shadows_no_module(
    settings: ClusterSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if settings.launcher == "ssh":
        pytest.skip("workers over ssh have only their own search path")
    (tmp_path / "random.py").write_text("print('not the one of the library')\n")
    (tmp_path / "of_a_user.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])  # as commands have it

    async def live() -> None:
        async with empty_pool(settings) as pool:
            await pool.start_until_joined([generator(settings)])
            async with client_of(pool) as client:
                names = "random", "of_a_user"
                received = await client.submit(
                    lambda: [import_module(name).__file__ for name in names]
                )
            assert received == [random.__file__, str(tmp_path / "of_a_user.py")]

    run(live)


async def third_process(pool: WorkerPool, placement: WorkerPlacement) -> psutil.Process:
    """Return a worker's process after the first was killed and the second hung."""
    await pool.start_until_joined([placement])
    (record,) = pool.registry.all()
    first = await process_of(pool)
    os.kill(first.pid, signal.SIGKILL)
    second = await process_of(pool, other_than=first.pid)
    assert [death.cause for death in record.deaths] == ["killed by signal 9"]
    os.kill(second.pid, signal.SIGSTOP)
    await pool.replace(placement.name, why="it hangs")
    third = await process_of(pool, other_than=second.pid)
    assert len(record.deaths) == 2
    await gone(first, second)
    return third


def test_killed_and_stopped_workers_are_noticed_and_start_again(settings: ClusterSettings) -> None:
    async def die_twice() -> None:
        async with empty_pool(settings) as pool:
            third = await third_process(pool, generator(settings))
        await gone(third)

    run(die_twice)


def test_process_that_cannot_start_ends_the_start_with_its_last_words(
    settings: ClusterSettings,
) -> None:
    async def fail() -> None:
        async with empty_pool(settings) as pool:
            broken = generator(settings, PYTHONHOME="/nowhere")
            with pytest.raises(EngineError, match=r"generator-0 to start.*exit status 1: .+"):
                await pool.start_until_joined([broken])

    run(fail)


DRIVER = """
import asyncio, sys
from areal_flow.config.cluster import ClusterSettings
from tests.contracts.test_launchers import empty_pool, generator, process_of

async def live(settings):
    async with empty_pool(settings) as pool:
        await pool.start_until_joined([generator(settings)])
        print((await process_of(pool)).pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(live(ClusterSettings.model_validate_json(sys.argv[1])))
"""


def test_worker_ends_with_its_driver_even_if_it_hangs(settings: ClusterSettings) -> None:
    check_worker_ends_with(DRIVER, settings.model_dump_json(exclude_none=True))


def check_worker_ends_with(program: str, *arguments: str) -> None:
    """Kill a driver while its worker is stopped; the driver prints the worker's pid."""
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path.cwd()) as driver:
        assert driver.stdout is not None
        worker = psutil.Process(int(driver.stdout.readline()))
        helpers = psutil.Process(driver.pid).children(recursive=True)
        worker.suspend()
        driver.kill()
    assert not psutil.wait_procs([worker, *helpers], timeout=LIMIT_S)[1]
