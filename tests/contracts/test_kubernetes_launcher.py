"""Pods by the real `kubectl`: disrupted ones start again, and those that wait are waited for."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_flow.cluster import pool as pools
from areal_flow.cluster.launchers.kubernetes import KubernetesLauncher
from areal_flow.config.cluster import ClusterSettings, KubernetesSettings
from areal_flow.core.errors import EngineError
from tests.contracts.test_launchers import empty_pool, generator, process_of, run
from tests.kubernetes_api import IMAGE, FakeKubernetes, running_kubernetes

SETTINGS = ClusterSettings(launcher="kubernetes", kubernetes=KubernetesSettings(image=IMAGE))
GENERATOR = generator(SETTINGS)


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[FakeKubernetes]:
    with running_kubernetes(tmp_path) as fake, pytest.MonkeyPatch.context() as patch:
        patch.setattr(KubernetesLauncher, "poll_s", 1.0)
        yield fake


async def until_there(fake: FakeKubernetes) -> str:
    """Wait for the only worker's Pod and return its name."""
    while not (names := fake.names("generator-0")):
        await asyncio.sleep(0.1)
    (name,) = names
    return name


def test_preempted_pod_counts_as_a_death_and_another_starts(
    kubernetes: FakeKubernetes, tmp_path: Path
) -> None:
    async def end_one() -> None:
        async with empty_pool(SETTINGS) as pool:
            await pool.start_until_joined([GENERATOR])
            (record,) = pool.registry.all()
            first, name = await process_of(pool), await until_there(kubernetes)
            kubernetes.disrupt(name, "PreemptionByScheduler", "a Pod of higher priority")
            await process_of(pool, other_than=first.pid)
            cause = f"Pod {name}: PreemptionByScheduler: a Pod of higher priority"
            assert [death.cause for death in record.deaths] == [cause]

    run(end_one)
    assert not kubernetes.names()
    assert not [*tmp_path.glob("*.token")]


@pytest.mark.slow
def test_pending_pod_is_waited_for_with_its_reason(
    kubernetes: FakeKubernetes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pools, "JOIN_TIMEOUT_S", 7.0)
    kubernetes.unschedulable = "0/3 nodes are available: 3 Insufficient cpu."

    async def wait() -> None:
        async with empty_pool(SETTINGS) as pool:
            starting = asyncio.ensure_future(pool.start_until_joined([GENERATOR]))
            name = await until_there(kubernetes)
            await asyncio.sleep(9)
            kubernetes.schedule()
            await starting
            waits = f"generator-0 waits as Pod {name} (Unschedulable: 0/3 nodes are available: 3"
            assert caplog.text.count(waits) == 1

    run(wait)


def test_pending_pod_is_deleted_with_its_run(kubernetes: FakeKubernetes) -> None:
    kubernetes.unschedulable = "no nodes"

    async def stop() -> None:
        async with empty_pool(SETTINGS) as pool:
            starting = asyncio.ensure_future(pool.start_until_joined([GENERATOR]))
            await until_there(kubernetes)
            starting.cancel()
        await asyncio.sleep(0.1)
        assert not kubernetes.pods

    run(stop)


def test_pod_that_kubernetes_refuses_ends_the_start_with_its_message(
    kubernetes: FakeKubernetes, tmp_path: Path
) -> None:
    template = tmp_path / "pod.yaml"
    template.write_text("kind: Pod\nspec: {nodeSelectr: {gpu: h100}}")
    own = KubernetesSettings(image=IMAGE, templates={"all": template})

    async def fail() -> None:
        wrong = ClusterSettings(launcher="kubernetes", kubernetes=own)
        async with empty_pool(wrong) as pool:
            with pytest.raises(EngineError, match=r"to start on Kubernetes.*nodeSelectr"):
                await pool.start_until_joined([GENERATOR])

    run(fail)
    assert not kubernetes.pods


def test_pod_of_a_driver_in_a_pod_has_its_image_and_goes_with_it(
    kubernetes: FakeKubernetes,
) -> None:
    name = socket.gethostname()
    container = {"name": "driver", "image": IMAGE}
    driver = kubernetes.add(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"containers": [container]},
        }
    )

    async def live() -> None:
        async with empty_pool(ClusterSettings(launcher="kubernetes")) as pool:
            await pool.start_until_joined([GENERATOR])
            pod = kubernetes.pods[await until_there(kubernetes)]
            (owner,) = pod["metadata"]["ownerReferences"]
            assert (owner["name"], owner["uid"]) == (name, driver["metadata"]["uid"])
            assert pod["spec"]["containers"][0]["image"] == IMAGE

    run(live)
    assert [*kubernetes.pods] == [name]


def test_server_that_does_not_answer_is_named_without_the_log_of_kubectl(
    kubernetes: FakeKubernetes, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.write_text(re.sub(r"http://127.0.0.1:\d+", "http://127.0.0.1:1", config.read_text()))

    async def fail() -> None:
        async with empty_pool(SETTINGS) as pool:
            why = r"generator-0 cannot be submitted: The connection to the server 127.0.0.1:1 was"
            with pytest.raises(EngineError, match=why):
                await pool.start_until_joined([GENERATOR])

    run(fail)
    assert not kubernetes.pods
