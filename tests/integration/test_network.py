"""Workers over ssh train a policy; connections with TLS refuse whoever has no certificate."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from distributed import Client, get_worker

import areal_flow
from areal_flow.cluster.certificates import with_certificates
from areal_flow.cluster.control import add_workers, list_workers, remove_worker
from areal_flow.cluster.launch import launch_cluster
from areal_flow.cluster.placement import WorkerPlacement, worker_environment
from areal_flow.cluster.pool import PLANNED_STEPS, Autoscaler
from areal_flow.cluster.worker import WorkerContext
from areal_flow.config.cluster import ClusterSettings, NetworkSettings
from areal_flow.core.errors import ConfigError, RunError
from areal_flow.flow.diagnosis import SETTLING_STEPS, WINDOW_STEPS
from tests.integration.runs import check_accounting, run_small, small_recipe
from tests.sshd import running_sshd
from tests.unit.test_balance import row


def certificates(directory: Path) -> NetworkSettings:
    """Return the settings of an authority, a certificate and its key, made for this test."""
    directory.mkdir()
    return with_certificates(NetworkSettings(), directory)


@pytest.mark.slow
def test_workers_are_listed_added_and_removed_over_tls_and_strangers_are_refused(
    tmp_path: Path,
) -> None:
    network, stranger = certificates(tmp_path / "ours"), certificates(tmp_path / "theirs")
    placement = WorkerPlacement("generator-0", "generator", 2, worker_environment(1))

    async def grow_and_shrink() -> None:
        settings = ClusterSettings(network=network)
        async with launch_cluster([placement], settings, WorkerContext(tmp_path, 0)) as cluster:
            assert cluster.scheduler.startswith("tls://127.0.0.1:")
            assert await add_workers(cluster.scheduler, "generator", 1, network) == ["generator-1"]
            await remove_worker(cluster.scheduler, "generator-0", network)
            (status,) = await list_workers(cluster.scheduler, network)
            assert status.name == "generator-1"
            assert status.address.startswith("tls://127.0.0.1:")
            with pytest.raises(RunError, match="does not answer"):
                await list_workers(cluster.scheduler, stranger)
            plain = cluster.scheduler.replace("tls://", "tcp://")
            with pytest.raises(OSError, match=r"."):
                await Client(plain, asynchronous=True, timeout=2)

    asyncio.run(grow_and_shrink())


@pytest.mark.slow
def test_generators_are_added_while_the_trainer_waits_and_removed_when_they_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    placement = WorkerPlacement("generator-0", "generator", 2, worker_environment(1))

    async def balance() -> None:
        async with launch_cluster(
            [placement], ClusterSettings(), WorkerContext(tmp_path, 0)
        ) as cluster:
            autoscaler = Autoscaler(cluster.pool, (1, 2))
            numbers = asyncio.Queue[int]()
            cluster.pool.subscribe(numbers.put_nowait)
            assert await numbers.get() == 1
            for demand, before, after in ((2.0, 1, 2), (0.5, 2, 1)):
                for _ in range(WINDOW_STEPS + SETTLING_STEPS):
                    autoscaler.after_step(row(demand, before))
                assert await asyncio.wait_for(numbers.get(), 60) == after
                await asyncio.sleep(0.1)
            script = "import sys; print(2 if sys.argv[1:] == ['3', '1'] else sys.exit('no plan'))"
            planned = Autoscaler(cluster.pool, (1, 2), planner=(sys.executable, "-c", script))
            for first in (1, 3):
                for step in range(first, first + PLANNED_STEPS + SETTLING_STEPS):
                    planned.after_step({"step": step - SETTLING_STEPS})
                async with asyncio.timeout(60):
                    while "no plan" not in caplog.text:
                        await asyncio.sleep(0.02)
                await asyncio.sleep(0.1)
            async with asyncio.timeout(60):
                while await numbers.get() != 2:
                    pass  # the one that left is told of twice

    asyncio.run(balance())
    assert "the number of generators stays: the planner failed: no plan" in caplog.text


async def note_and_wait(notes: Path) -> str:
    name = str(get_worker().name)
    with notes.open("a") as file:
        file.write(f"{name}\n")
    await asyncio.sleep(5)
    return name


@pytest.mark.slow
def test_generator_that_leaves_finishes_its_rollout(tmp_path: Path) -> None:
    like, notes = WorkerPlacement("", "generator", 2, worker_environment(1)), tmp_path / "notes"

    async def leave() -> None:
        placements = [replace(like, name=f"generator-{number}") for number in range(2)]
        async with launch_cluster(
            placements, ClusterSettings(), WorkerContext(tmp_path, 0)
        ) as cluster:
            options = {"resources": {"generator": 1}, "pure": False}
            task = cluster.client.submit(note_and_wait, notes, **options)
            while not (notes.exists() and notes.read_text()):
                await asyncio.sleep(0.05)
            name = notes.read_text().strip()
            leaving = cluster.pool.registry.named(name)
            assert leaving is not None
            assert leaving.address
            await cluster.pool.remove(name, after_tasks=True)
            assert not leaving.address
            assert await task == name
            assert notes.read_text() == f"{name}\n", "it ran once"

    asyncio.run(leave())


def test_missing_certificate_is_refused_before_anything_starts(tmp_path: Path) -> None:
    network = certificates(tmp_path / "ours")
    assert network.tls_directory is not None
    (network.tls_directory / "key.pem").unlink()

    async def start() -> None:
        settings = ClusterSettings(network=network)
        async with launch_cluster([], settings, WorkerContext(tmp_path, 0)):
            pytest.fail("it started")

    with pytest.raises(ConfigError, match=r"cluster.network.tls_directory: there is no file"):
        asyncio.run(start())


def test_policy_is_trained_by_workers_over_ssh_and_none_is_left(tmp_path: Path) -> None:
    (tmp_path / "sshd").mkdir()
    with running_sshd(tmp_path / "sshd") as options:
        recipe = small_recipe(
            num_steps=2,
            prompts={"num_held_out": 0},
            cluster={
                "launcher": "ssh",
                "remote": {"hosts": ["127.0.0.1", "localhost"], "ssh_options": list(options)},
            },
        )
        layout = run_small(tmp_path / "runs" / "ssh", recipe)
        (server,) = [child for child in psutil.Process().children() if child.name() == "sshd"]
        assert not psutil.wait_procs(server.children(recursive=True), timeout=20)[1]
    check_accounting(layout)
    assert len(areal_flow.open_run(layout.root).steps("arrow")) == 3
