"""A run on three hosts goes on while one is cut off, which later rejoins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import sleep

import pytest

from areal_flow.cluster.placement import WorkerPlacement, worker_environment
from areal_flow.config.cluster import ClusterSettings, RemoteSettings
from tests.chaos import SETTINGS
from tests.contracts.test_launchers import empty_pool, run
from tests.hosts import network_of_hosts
from tests.sshd import HOST, running_sshd
from tests.struck_run import StruckRun

CUT_OFF_S = 45.0
"""Longer than ssh takes to notice (15 s), and than three vain attempts to start a worker."""


@pytest.mark.slow
def test_twelve_workers_start_on_one_host_with_the_default_settings_of_sshd(tmp_path: Path) -> None:
    with running_sshd(tmp_path, max_startups="10:30:100") as options:
        remote = RemoteSettings(hosts=(HOST,), ssh_options=options)
        settings = ClusterSettings(launcher="ssh", remote=remote)
        like = WorkerPlacement("", "reward", 1, worker_environment(1), host=HOST)

        async def start() -> None:
            async with empty_pool(settings) as pool:
                await pool.start_until_joined(
                    [replace(like, name=f"reward-{number}") for number in range(12)]
                )
                assert len(pool.registry.present("reward")) == 12

        run(start)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_host_that_is_cut_off_costs_no_data_and_joins_again(tmp_path: Path) -> None:
    (tmp_path / "sshd").mkdir()
    with network_of_hosts(3) as (address, hosts):
        entered = {host.address: host.enter for host in hosts}
        with running_sshd(tmp_path / "sshd", entered) as options:
            struck = StruckRun(tmp_path)
            on_hosts = {
                "cluster.launcher": "ssh",
                "cluster.remote.hosts": str([*entered]),
                "cluster.remote.ssh-options": str([*options]),
                "cluster.network.host": address,
                "cluster.num-generators": "2",
            }
            try:
                struck.begin({**SETTINGS, **on_hosts})
                lost = next(
                    host
                    for host in hosts
                    for worker in struck.live_workers("generator")
                    if host.address in worker.address and worker.name == "generator-1"
                )
                lost.cut_off()
                struck.wait_until(lambda: len(struck.live_workers("generator")) == 1, "the loss")
                struck.wait_for_steps(3, "steps of the other hosts")
                sleep(CUT_OFF_S)
                struck.audit()
                lost.join()
                struck.wait_until(lambda: len(struck.live_workers("generator")) == 2, "both again")
                struck.wait_for_steps(2, "steps of all hosts")
                assert struck.stop() == 143
            finally:
                struck.close()
            log = struck.log.read_text()
            assert "generator-1: ssh ended" in log
            assert "quarantined" not in log
            struck.audit()
