"""While a cluster runs, its driver collects garbage quickly and Dask logs nothing; not after."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import resource
import subprocess
import sys
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
from cryptography import x509

from areal_flow.cluster.certificates import with_certificates
from areal_flow.cluster.control import list_workers
from areal_flow.cluster.launch import check_cluster, launch_cluster
from areal_flow.cluster.launchers.local import LocalLauncher
from areal_flow.cluster.open_files import CONNECTIONS_PER_WORKER
from areal_flow.cluster.placement import WorkerPlacement, worker_environment
from areal_flow.cluster.worker import WorkerContext
from areal_flow.config import build_recipe
from areal_flow.config.cluster import ClusterSettings, NetworkSettings
from areal_flow.core.errors import ConfigError, RunError


async def test_garbage_collections_leave_out_what_was_there_before_the_cluster(
    tmp_path: Path,
) -> None:
    async with launch_cluster([], ClusterSettings(), WorkerContext(tmp_path, 1)):
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


async def test_loggers_that_are_silent_beside_a_cluster_are_as_they_were_after_it(
    tmp_path: Path,
) -> None:
    tornado = logging.getLogger("tornado.access")
    tornado.setLevel(logging.INFO)
    async with launch_cluster([], ClusterSettings(), WorkerContext(tmp_path, 1)):
        assert tornado.level == logging.CRITICAL
    assert tornado.level == logging.INFO


async def test_dashboard_of_a_cluster_is_the_page_of_its_run_on_this_machine_alone(
    tmp_path: Path,
) -> None:
    async with launch_cluster([], ClusterSettings(), WorkerContext(tmp_path, 1)) as cluster:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/rl", cluster.dashboard)
        answer = await asyncio.to_thread(urlopen, cluster.dashboard)
        assert '<a href="rl">Rl</a>' in answer.read().decode()
        assert await cluster.feed.shown() == {}


async def test_the_scheduler_refuses_connections_without_this_users_certificate(
    tmp_path: Path,
) -> None:
    async with launch_cluster([], ClusterSettings(), WorkerContext(tmp_path, 1)) as cluster:
        assert cluster.scheduler.startswith("tls://127.0.0.1:")
        folder = cluster.network.tls_directory
        assert folder is not None
        assert folder.stat().st_mode & 0o777 == 0o700
        assert await list_workers(cluster.scheduler, cluster.network) == []
        plain = cluster.scheduler.replace("tls://", "tcp://")
        foreign = with_certificates(NetworkSettings(), tmp_path)
        for address, network in ((cluster.scheduler, foreign), (plain, NetworkSettings())):
            with pytest.raises(RunError, match="does not answer"):
                await list_workers(address, network)
    assert not folder.exists()


async def test_scheduler_keeps_few_messages_and_nothing_of_finished_work(tmp_path: Path) -> None:
    placement = WorkerPlacement("reward-0", "reward", 1, worker_environment(1))
    async with launch_cluster([placement], ClusterSettings(), WorkerContext(tmp_path, 1)) as made:
        scheduler = made.pool.scheduler
        (worker,) = scheduler.workers.values()
        joined = worker.last_seen
        for number in range(20):
            assert await made.client.submit(abs, -number) == number
        (messages,) = scheduler.stream_comms.values()
        assert len(messages.recent_message_log) <= 10
        assert "spans" not in scheduler.extensions
        async with asyncio.timeout(20):
            while worker.last_seen == joined:  # a worker with other extensions is not understood
                await asyncio.sleep(0.05)


def test_certificate_is_valid_on_a_host_whose_clock_is_behind(tmp_path: Path) -> None:
    with_certificates(NetworkSettings(), tmp_path)
    certificate = x509.load_pem_x509_certificate((tmp_path / "certificate.pem").read_bytes())
    now = datetime.now(UTC)
    assert certificate.not_valid_before_utc <= now - timedelta(hours=12)
    assert certificate.not_valid_after_utc > now + timedelta(days=300)


@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_given_key_that_others_can_read_is_refused(mode: int, tmp_path: Path) -> None:
    network = with_certificates(NetworkSettings(), tmp_path)
    recipe = build_recipe({"cluster": {"network": {"tls_directory": tmp_path}}}, source="test")
    check_cluster(recipe)
    (tmp_path / "key.pem").chmod(mode)
    for refuse in (lambda: check_cluster(recipe), lambda: with_certificates(network, tmp_path)):
        with pytest.raises(ConfigError, match=f"read .*key.pem .mode {mode:o}.*chmod 600"):
            refuse()


MANY_WORKERS = """
import asyncio, os, resource
from distributed import Scheduler, Worker
from areal_flow.cluster.open_files import allow_open_files

async def start():
    options = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": None}
    async with Scheduler(port=0, **options) as scheduler:
        workers = [Worker(scheduler.address, nthreads=1, **options) for _ in range(250)]
        await asyncio.gather(*workers)
        assert len(scheduler.workers) == 250
        os._exit(0)

resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
allow_open_files(250, files_per_worker=3)
asyncio.run(start())
"""


@pytest.mark.slow
def test_two_hundred_and_fifty_workers_start_where_a_process_may_open_1024_files(
    tmp_path: Path,
) -> None:
    """Both ends of their connections are in this process; a driver has one of them."""
    subprocess.run([sys.executable, "-c", MANY_WORKERS], check=True, cwd=tmp_path, timeout=120)


def set_hard_limit(hard: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Have this process a soft limit of 256 open files; return the limits that are set."""
    limits = [(256, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: limits.append(both))
    return limits


@pytest.mark.parametrize("hard", [4096, 1024])
def test_limit_of_open_files_is_raised_or_the_workers_are_refused(
    hard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = set_hard_limit(hard, monkeypatch)
    recipe = build_recipe({"cluster": {"num_generators": 300}}, source="test")
    message = r"302 workers opens up to 2672 files \(256 \+ 8 a worker\).*open 1024.*most 96 work"
    expected = pytest.raises(ConfigError, match=message)
    with expected if hard == 1024 else nullcontext():
        check_cluster(recipe)
    assert limits[-1] == (hard, hard)


def test_generators_that_autoscaling_may_add_count_before_any_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_hard_limit(1024, monkeypatch)
    recipe = build_recipe({"cluster": {"generator_range": [1, 300]}}, source="test")
    with pytest.raises(ConfigError, match="a driver of 302 workers"):
        check_cluster(recipe)


@pytest.mark.slow
async def test_workers_open_no_more_files_of_their_driver_than_were_counted(
    tmp_path: Path,
) -> None:
    """Also while each has work and answers a broadcast."""
    placements = [
        WorkerPlacement(f"generator-{index}", "generator", 1, worker_environment(1))
        for index in range(6)
    ]
    driver = psutil.Process()
    async with launch_cluster([], ClusterSettings(), WorkerContext(tmp_path, 1)) as cluster:
        before, pool = driver.num_fds(), cluster.pool
        await pool.start_until_joined(placements)
        await cluster.client.gather(cluster.client.map(abs, range(100)))
        await cluster.client.run(os.getpid)
        opened = driver.num_fds() - before
    assert opened <= len(placements) * (CONNECTIONS_PER_WORKER + LocalLauncher.files_per_worker)


def refuse() -> None:
    raise ConfigError("not here")


async def test_function_runs_beside_the_tasks_of_a_worker_and_its_error_is_returned(
    tmp_path: Path,
) -> None:
    placement = WorkerPlacement("reward-0", "reward", 1, worker_environment(1))
    async with launch_cluster([placement], ClusterSettings(), WorkerContext(tmp_path, 1)) as made:
        (worker,) = made.pool.scheduler.workers.values()
        assert await made.pool.run(worker.address, os.getpid) == worker.pid
        error = await made.pool.run(worker.address, refuse)
        assert isinstance(error, ConfigError)
        assert str(error) == "not here"
        slow = asyncio.ensure_future(made.pool.run(worker.address, asyncio.sleep, 60))
        await asyncio.sleep(0.2)
        slow.cancel()
        assert await made.pool.run(worker.address, os.path.basename, "a/b") == "b"
