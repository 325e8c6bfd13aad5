"""Kill a real run again and again, resume it each time, and show that nothing was lost.

Processes are killed (`kill -9`) or hung (SIGSTOP) at random moments, some of them chosen to lie
inside a commit, a ledger append or a checkpoint: driver, scheduler, generators, trainer, reward
worker. A driver that hung is taken over by another and woken up later. After every strike the run
is audited, as it lies there or as it goes on; at its end all steps are trained again from step 0.

| strike     | what it does                                                                     |
|------------|----------------------------------------------------------------------------------|
| driver     | killed; or hung, taken over, and woken up beside its successor                   |
| scheduler  | ended from within, while its driver lives                                        |
| generator, | killed; or hung, until the run finds out by itself                               |
| trainer, reward |                                                                             |

    python benchmarks/chaos.py [--strikes 60] [--seed 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal

import psutil
from distributed.core import rpc

import areal_flow
from areal_flow.audit.run import check_run
from areal_flow.cluster.control import WorkerStatus, list_workers
from areal_flow.cluster.settings import NetworkSettings
from areal_flow.cluster.worker_process import connection_security
from areal_flow.recovery.checkpoints import list_checkpoints
from areal_flow.recovery.replay import replay_step
from areal_flow.run.layout import RunLayout

Victim = Literal["driver", "scheduler", "generator", "trainer", "reward"]
Moment = Literal["any", "commit", "append", "checkpoint", "start"]

SETTINGS = {
    "prompts.num-prompts": "4000",
    "prompts.num-held-out": "0",
    "sft.num-steps": "20",
    "generation.max-num-seqs": "32",
    "generation.max-new-tokens": "24",
    "generation.max-model-len": "64",
    "controller.batch-size": "128",
    "controller.group-size": "8",
    "trainer.checkpoint-every-steps": "3",
    "cluster.silent-after-s": "3",
    "rewards": '[{verifier = "benchmarks.verifiers:reward_short"}]',
    "tracking.enabled": "false",
}
PATIENCE_S = 120.0
LAST_STEPS = 3


@dataclass(frozen=True, slots=True)
class Strike:
    """What befalls whom, and when."""

    victim: Victim
    hang: bool
    moment: Moment
    delay_s: float


def draw_strike(randomness: random.Random) -> Strike:
    """Return a random strike; drivers are struck most often, since they hold everything."""
    victims: list[Victim] = ["driver", "driver", "driver", "scheduler", "generator", "generator"]
    victim = randomness.choice([*victims, "trainer", "trainer", "reward"])
    moments: list[Moment] = ["any", "any", "commit", "append", "checkpoint"]
    if victim in ("driver", "trainer"):
        moments.append("start")
    hang = victim != "scheduler" and randomness.random() < 0.4
    return Strike(victim, hang, randomness.choice(moments), randomness.uniform(0.0, 3.0))


@dataclass
class Record:
    """What happened, and what it cost."""

    strikes: Counter[str] = field(default_factory=Counter)
    num_lives: int = 0
    num_audits: int = 0
    committed: set[str] = field(default_factory=set)
    refused_drivers: int = 0
    num_quarantines: int = 0
    is_clean: bool = False


class DriverEnded(AssertionError):
    """A driver ended by itself."""


class Chaos:
    """One run, its driver of the moment, and the drivers that hang."""

    def __init__(
        self,
        root: Path,
        *,
        seed: int,
        num_generators: int,
        say: Callable[[str], None],
        settings: Mapping[str, str] = SETTINGS,
    ) -> None:
        self.layout = RunLayout((root / "runs" / "chaos").resolve())
        self.record = Record()
        self._root = root
        self._settings = {**settings, "cluster.num-generators": str(num_generators)}
        self._log = (root / "drivers.log").open("a")
        self._randomness = random.Random(seed)
        self._say = say
        self._driver: subprocess.Popen[bytes] | None = None
        self._hung: list[subprocess.Popen[bytes]] = []
        self._said_before = 0

    # Lives

    def begin(self) -> None:
        """Start the run and wait for its first steps."""
        settings = [text for name, value in self._settings.items() for text in (f"--{name}", value)]
        self._start("--name", "chaos", "--num-steps", "100000", "--seed", "3", *settings)
        self._await(lambda: self.head() >= 2, "the run to begin")

    def survive(self, num_strikes: int) -> None:
        """Strike, and have the run go on, so many times."""
        strikes = [draw_strike(self._randomness) for _ in range(num_strikes)]
        for number, strike in enumerate(strikes, 1):
            self._say(f"strike {number}: {strike}, at step {self.head()}")
            try:
                self._strike(strike)
            except DriverEnded:
                if not self._driver_gave_up_on_a_worker():
                    raise
                self.record.num_quarantines += 1
                self._audit()
                self._resume()
            self.record.strikes[f"{strike.victim} {'hung' if strike.hang else 'killed'}"] += 1

    def finish(self) -> int:
        """Ask the last driver to stop, as a user does; return its exit code."""
        self._wake_the_hung()
        head = self.head()
        self._await(lambda: self.head() >= head + LAST_STEPS, "the last steps")
        assert self._driver is not None
        self._driver.terminate()
        code = self._driver.wait(PATIENCE_S)
        self._audit()
        return code

    def close(self) -> None:
        """Leave no process behind."""
        for process in [*self._hung, *([self._driver] if self._driver else [])]:
            process.kill()
            process.wait()
        self._log.close()

    def head(self) -> int:
        """Return the newest step."""
        if not self.layout.steps.is_dir():
            return -1
        steps = areal_flow.open_run(self.layout.root).steps("arrow", columns=["step"])
        return len(steps) - 1

    # Strikes

    def _strike(self, strike: Strike) -> None:
        if strike.moment != "start":
            head = self.head()
            self._await(lambda: self.head() > head, "a step")
        if strike.victim == "driver":
            self._strike_driver(strike)
        elif strike.victim == "scheduler":
            self._wait_for(strike)
            asyncio.run(_end_scheduler(*self._scheduler()))
            self._await(self._driver_is_gone, "the driver to notice that its scheduler is gone")
            self._audit()
            self._resume()
        else:
            self._strike_worker(strike)

    def _strike_driver(self, strike: Strike) -> None:
        if strike.moment == "start":
            self._kill_driver()
            self._start("--resume", "chaos")
        self._wait_for(strike)
        assert self._driver is not None
        if not strike.hang:
            self._kill_driver()
            self._audit()
            self._resume()
            return
        self._driver.send_signal(signal.SIGSTOP)
        self._hung.append(self._driver)
        self._start("--resume", "chaos", "--take-over")
        head = self.head()
        self._await(lambda: self.head() > head, "a step of the driver that took over")
        if self._randomness.random() < 0.7:
            self._wake_the_hung()
        self._audit()

    def _strike_worker(self, strike: Strike) -> None:
        self._wait_for(strike)
        worker = self.live_worker(strike.victim)
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGSTOP if strike.hang else signal.SIGKILL)
        self._audit()

    def live_worker(self, role: str) -> WorkerStatus:
        """Return a random live worker of a role, once there is one."""
        found: list[WorkerStatus] = []

        def one_is_there() -> bool:
            found[:] = [w for w in self._workers() if w.role == role and w.state == "live"]
            return bool(found)

        self._await(one_is_there, f"a live {role}")
        return self._randomness.choice(found)

    def _wait_for(self, strike: Strike) -> None:
        """Return at the moment of a strike."""
        sleep(strike.delay_s)
        changed = {
            "commit": lambda: _entries(self.layout.trajectories / "data"),
            "append": lambda: _entries(self.layout.steps / "data"),
            "checkpoint": lambda: bool(list(self.layout.checkpoints.glob(".partial-*"))),
        }.get(strike.moment)
        if changed is None:
            return
        before, until = changed(), monotonic() + 10
        while changed() == before and monotonic() < until:
            sleep(0.002)

    # Drivers

    def _start(self, *arguments: str) -> None:
        self.record.num_lives += 1
        self._said_before = (self._root / "drivers.log").stat().st_size
        self._driver = subprocess.Popen(
            [sys.executable, "-m", "pipelines.cli.main", "train", *arguments],
            cwd=self._root,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _resume(self) -> None:
        self._start("--resume", "chaos")
        head = self.head()
        self._await(lambda: self.head() > head, "a step after the resume")

    def _driver_gave_up_on_a_worker(self) -> bool:
        """Return whether a worker was struck so often, right after its start, that it ended all."""
        said = (self._root / "drivers.log").read_bytes()[self._said_before :]
        return b"is quarantined" in said

    def _kill_driver(self) -> None:
        assert self._driver is not None
        children = psutil.Process(self._driver.pid).children(recursive=True)
        self._driver.kill()
        self._driver.wait()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive, f"processes outlived their driver: {alive}"

    def _wake_the_hung(self) -> None:
        """Let drivers that were taken over go on: each must find itself refused, and end."""
        for process in self._hung:
            process.send_signal(signal.SIGCONT)
            code = process.wait(PATIENCE_S)
            assert code == 1, f"a driver that was taken over ended with {code}"
            self.record.refused_drivers += 1
        self._hung = []

    def _driver_is_gone(self) -> bool:
        return self._driver is not None and self._driver.poll() is not None

    def _await(self, happened: Callable[[], bool], what: str) -> None:
        until = monotonic() + PATIENCE_S
        while not happened():
            if monotonic() > until:
                raise AssertionError(f"waited {PATIENCE_S:.0f} s for {what}")
            if self._driver_is_gone() and "driver" not in what:
                raise DriverEnded(f"the driver ended while this waited for {what}")
            sleep(0.05)

    def _scheduler(self) -> tuple[str, NetworkSettings]:
        self._await(self.layout.cluster.is_file, "the cluster")
        found = json.loads(self.layout.cluster.read_text())
        return found["scheduler"], NetworkSettings.model_validate(found["network"])

    def _workers(self) -> list[WorkerStatus]:
        return asyncio.run(list_workers(*self._scheduler()))

    # Audits

    def _audit(self) -> None:
        """Check the books of the run as it lies there, and that what was committed still is."""
        report = check_run(self.layout)
        self.record.is_clean = report.clean
        assert report.clean, [f for f in report.findings if f.severity == "error"]
        found = areal_flow.open_run(self.layout.root).trajectories(
            "arrow", columns=["trajectory_id"]
        )
        committed = set(found["trajectory_id"].to_pylist())
        lost = self.record.committed - committed
        assert not lost, f"{len(lost)} committed trajectories are gone, such as {min(lost)}"
        self.record.committed = committed
        self.record.num_audits += 1


def _entries(folder: Path) -> frozenset[str]:
    return frozenset(path.name for path in folder.iterdir())


async def _end_scheduler(address: str, network: NetworkSettings) -> None:
    security = connection_security(network).get_connection_args("client")
    with suppress(OSError, RuntimeError):  # whatever it says as it ends
        async with rpc(address, connection_args=security) as scheduler:
            await scheduler.terminate()


def run_chaos(
    root: Path,
    *,
    num_strikes: int,
    seed: int,
    num_generators: int = 2,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Strike a run `num_strikes` times; return the report.

    Raises:
        AssertionError: something was lost, or the run did not go on.
    """
    chaos = Chaos(root, seed=seed, num_generators=num_generators, say=say)
    began = monotonic()
    try:
        chaos.begin()
        chaos.survive(num_strikes)
        code = chaos.finish()
        seconds = monotonic() - began
        steps = areal_flow.open_run(chaos.layout.root).steps("arrow").sort_by("step").to_pylist()
        say(f"replaying {len(steps) - 1} steps from step 0")
        last = replay_step(chaos.layout, step=len(steps) - 1, from_checkpoint=0)
        replayed = last.replayed.hashes
    except BaseException:
        say("what the drivers said last:\n" + (root / "drivers.log").read_text()[-4000:])
        raise
    finally:
        chaos.close()
    trained = Counter(identifier for row in steps for identifier in row["trajectory_ids"])
    return {
        "strikes": dict(sorted(chaos.record.strikes.items())),
        "num_strikes": num_strikes,
        "num_drivers": chaos.record.num_lives,
        "num_quarantines": chaos.record.num_quarantines,
        "num_refused_drivers": chaos.record.refused_drivers,
        "num_audits": chaos.record.num_audits,
        "num_steps": len(steps) - 1,
        "num_weights": len({row["weights_hash"] for row in steps}),
        "num_checkpoints": len(list_checkpoints(chaos.layout.checkpoints)),
        "num_committed": len(chaos.record.committed),
        "num_trained": len(trained),
        "num_trained_twice": sum(count > 1 for count in trained.values()),
        "final_exit_code": code,
        "check_is_clean": chaos.record.is_clean,
        "recorded_weights_hash": steps[-1]["weights_hash"],
        "replayed_weights_hash": replayed.weights_hash,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strikes", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="areal-flow-chaos-") as scratch:
        report = run_chaos(Path(scratch), num_strikes=arguments.strikes, seed=arguments.seed)
    for name, value in report.items():
        print(f"{name}: {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
