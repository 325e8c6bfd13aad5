"""Workers as Pods train a policy; a deleted Pod and a killed driver cost no data.

The API server is the tests' own; `kubectl`, the workers and the driver are real.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import pytest

from tests.chaos import SETTINGS
from tests.integration.runs import ENVIRONMENT
from tests.kubernetes_api import IMAGE, running_kubernetes
from tests.struck_run import StruckRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORKERS = ("trainer-0", "generator-0", "generator-1", "reward-0")
ON_KUBERNETES = {
    **SETTINGS,
    "cluster.launcher": "kubernetes",
    "cluster.kubernetes.image": IMAGE,
    "cluster.num-generators": "2",
    "cluster.heartbeat-timeout-s": "10",
}


def test_deleted_pod_and_killed_driver_lose_nothing(tmp_path: Path) -> None:
    run = StruckRun(tmp_path)
    with running_kubernetes(tmp_path) as kubernetes:
        try:
            run.begin(ON_KUBERNETES)
            assert all(len(kubernetes.names(worker)) == 1 for worker in WORKERS)
            (deleted,) = kubernetes.names("generator-1")
            kubernetes.unschedulable = "0/2 nodes are available: 2 Insufficient memory."
            subprocess.run(["kubectl", "delete", "pod", deleted, "--wait=false"], check=True)
            waits = "generator-1 waits as Pod"
            run.wait_until(lambda: waits in run.log.read_text(), "its Pod to stay Pending")
            run.wait_for_steps(1, "a step with one generator")
            kubernetes.schedule()
            run.wait_until(lambda: len(run.live_workers("generator")) == 2, "both generators")
            run.audit()
            run.kill_driver()
            until(lambda: not kubernetes.names(), "the Pods to end with their driver")
            run.audit()
            run.resume()
            run.wait_for_steps(2, "steps after the resume")
            assert run.stop() == 143
            assert not kubernetes.names()
            log = run.log.read_text()
            assert f"generator-1 died (Pod {deleted}: deleted)" in log, log
            assert "(Unschedulable: 0/2 nodes are available: 2 Insufficient memory.)" in log, log
            printed = {path.name for path in run.layout.jobs.glob("*.log")}
            assert f"generator-1-{deleted.rpartition('-')[2]}.log" in printed
            assert not [*run.layout.jobs.glob("*.token")]
        finally:
            run.close()
    run.audit()
    check = [sys.executable, "-m", "pipelines.cli.main", "check", "struck"]
    subprocess.run(check, cwd=tmp_path, env=ENVIRONMENT, check=True)


def until(happened: Callable[[], bool], what: str) -> None:
    deadline = monotonic() + 60
    while not happened():
        assert monotonic() < deadline, f"waited 60 s for {what}"
        sleep(0.2)
