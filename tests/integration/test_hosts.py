"""A run on three hosts goes on while one of them is cut off, which joins again later."""

from __future__ import annotations

from pathlib import Path
from time import sleep

import pytest

from tests.chaos import SETTINGS
from tests.hosts import network_of_hosts
from tests.sshd import running_sshd
from tests.struck_run import StruckRun

CUT_OFF_S = 45.0
"""Longer than ssh takes to notice (15 s), and than three vain attempts to start a worker."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_host_that_is_cut_off_costs_no_data_and_joins_again(tmp_path: Path) -> None:
    (tmp_path / "sshd").mkdir()
    with network_of_hosts(3) as (address, hosts):
        entered = {host.address: host.enter for host in hosts}
        with running_sshd(tmp_path / "sshd", entered) as options:
            run = StruckRun(tmp_path)
            on_hosts = {
                "cluster.launcher": "ssh",
                "cluster.remote.hosts": str([*entered]),
                "cluster.remote.ssh-options": str([*options]),
                "cluster.network.host": address,
                "cluster.num-generators": "2",
            }
            try:
                run.begin({**SETTINGS, **on_hosts})
                lost = next(
                    host
                    for host in hosts
                    for worker in run.live_workers("generator")
                    if host.address in worker.address and worker.name == "generator-1"
                )
                lost.cut_off()
                run.wait_until(lambda: len(run.live_workers("generator")) == 1, "the loss")
                run.wait_for_steps(3, "steps of the other hosts")
                sleep(CUT_OFF_S)
                run.audit()
                lost.join()
                run.wait_until(lambda: len(run.live_workers("generator")) == 2, "both again")
                run.wait_for_steps(2, "steps of all hosts")
                assert run.stop() == 143
            finally:
                run.close()
            log = run.log.read_text()
            assert "generator-1: ssh ended" in log
            assert "quarantined" not in log
            run.audit()
