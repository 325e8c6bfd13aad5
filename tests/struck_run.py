"""A real command-line run whose processes a test kills or stops, and that it audits."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic, sleep

import psutil

import areal_flow
from areal_flow.cluster.control import WorkerStatus, list_workers
from areal_flow.config.cluster import NetworkSettings
from areal_flow.core.layout import RunLayout
from areal_flow.log.audit.run import check_run

PATIENCE_S = 120.0


class DriverEnded(AssertionError):
    """A driver ended by itself."""


class StruckRun:
    """One run, its current driver, and the drivers that hang."""

    def __init__(self, root: Path, *python_path: Path) -> None:
        """Optionally take an import path for its processes, such as one with a `sitecustomize`."""
        self._python_path = os.pathsep.join(map(str, (*python_path, Path(__file__).parents[1])))
        self.layout = RunLayout((root / "runs" / "struck").resolve())
        self.log = root / "drivers.log"
        self.num_drivers = self.num_refused_drivers = self.num_audits = 0
        self.committed: set[str] = set()
        """Trajectories that an audit has found."""
        self._root = root
        self._log_file = self.log.open("a")
        self._log_bytes_before = 0
        self._driver: subprocess.Popen[bytes] | None = None
        self._hung: list[subprocess.Popen[bytes]] = []

    def begin(self, settings: Mapping[str, str]) -> None:
        """Start the run and wait for its first steps."""
        options = [text for name, value in settings.items() for text in (f"--{name}", value)]
        self._start("--name", "struck", "--num-steps", "100000", "--seed", "3", *options)
        self.wait_until(lambda: self.head() >= 2, "the run to begin")

    def restart(self) -> None:
        """Resume the run, and return before the driver is ready."""
        self._start("--resume", "struck")

    def resume(self) -> None:
        """Resume the run, and wait for a step."""
        self.restart()
        self.wait_for_steps(1, "a step after the resume")

    def take_over(self) -> None:
        """Stop the driver as if it hung, and start another one in its place."""
        self.driver.send_signal(signal.SIGSTOP)
        self._hung.append(self.driver)
        self._start("--resume", "struck", "--take-over")
        self.wait_for_steps(1, "a step of the driver that took over")

    def kill_driver(self) -> None:
        """Kill the driver; its workers must end by themselves."""
        children = psutil.Process(self.driver.pid).children(recursive=True)
        self.driver.kill()
        self.driver.wait()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive, f"processes outlived their driver: {alive}"

    def wake_hung_drivers(self) -> None:
        """Continue drivers that were taken over: each must be refused and exit."""
        for process in self._hung:
            process.send_signal(signal.SIGCONT)
            code = process.wait(PATIENCE_S)
            assert code == 1, f"a driver that was taken over ended with {code}"
            self.num_refused_drivers += 1
        self._hung = []

    def stop(self) -> int:
        """Ask the driver to stop, as a user does; return its exit code."""
        self.driver.terminate()
        return self.driver.wait(PATIENCE_S)

    def close(self) -> None:
        """Kill every driver that is left."""
        for process in [*self._hung, *([self._driver] if self._driver else [])]:
            process.kill()
            process.wait()
        self._log_file.close()

    @property
    def driver(self) -> subprocess.Popen[bytes]:
        assert self._driver is not None
        return self._driver

    def driver_is_gone(self) -> bool:
        return self._driver is not None and self._driver.poll() is not None

    def driver_quarantined_a_worker(self) -> bool:
        """Return whether the run ended because a worker died too often after its start."""
        return b"is quarantined" in self.log.read_bytes()[self._log_bytes_before :]

    def head(self) -> int:
        """Return the newest step."""
        if not self.layout.steps.exists():
            return -1
        steps = areal_flow.open_run(self.layout.root).steps("arrow", columns=["step"])
        return len(steps) - 1

    def scheduler(self) -> tuple[str, NetworkSettings]:
        """Return the scheduler's address, once there is one, and how to connect to it."""
        self.wait_until(self.layout.cluster.is_file, "the cluster")
        cluster = json.loads(self.layout.cluster.read_text())
        return cluster["scheduler"], NetworkSettings.model_validate(cluster["network"])

    def live_workers(self, role: str) -> list[WorkerStatus]:
        """Return a role's live workers, once there is one."""
        live: list[WorkerStatus] = []

        def one_is_live() -> bool:
            workers = asyncio.run(list_workers(*self.scheduler()))
            live[:] = [w for w in workers if w.role == role and w.state == "live"]
            return bool(live)

        self.wait_until(one_is_live, f"a live {role}")
        return live

    def wait_for_steps(self, num_steps: int, what: str) -> None:
        head = self.head()
        self.wait_until(lambda: self.head() >= head + num_steps, what)

    def wait_until(self, happened: Callable[[], bool], what: str) -> None:
        until = monotonic() + PATIENCE_S
        while not happened():
            if monotonic() > until:
                raise AssertionError(f"waited {PATIENCE_S:.0f} s for {what}")
            if self.driver_is_gone() and "driver" not in what:
                raise DriverEnded(f"the driver ended while this waited for {what}")
            sleep(0.05)

    def audit(self) -> None:
        """Audit the run, and check that earlier commits are still there."""
        report = check_run(self.layout)
        assert report.clean, [f for f in report.findings if f.severity == "error"]
        run = areal_flow.open_run(self.layout.root)
        table = run.trajectories("arrow", columns=["trajectory_id"])
        committed = set(table["trajectory_id"].to_pylist())
        lost = self.committed - committed
        assert not lost, f"{len(lost)} committed trajectories are gone, such as {min(lost)}"
        self.committed = committed
        self.num_audits += 1

    def _start(self, *arguments: str) -> None:
        self.num_drivers += 1
        self._log_bytes_before = self.log.stat().st_size
        self._driver = subprocess.Popen(
            [sys.executable, "-m", "pipelines.cli.main", "train", *arguments],
            cwd=self._root,
            env={**os.environ, "PYTHONPATH": self._python_path},
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
