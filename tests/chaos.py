"""Kill a real run again and again, resume it each time, and show that nothing was lost.

Processes are killed (`kill -9`) or hung (SIGSTOP) at random moments, some of them chosen to lie
inside a commit, a ledger append or a checkpoint. After every strike the run is audited, at rest or
while it goes on. At its end all steps are trained again from step 0.

| strike     | what it does                                                                     |
|------------|----------------------------------------------------------------------------------|
| driver     | killed; or hung, taken over, and woken up beside its successor                   |
| scheduler  | ended from within, while its driver lives                                        |
| generator, | killed; or hung, until the run finds out by itself                               |
| trainer, reward |                                                                             |

    python -m tests.chaos [--strikes 60] [--seed 0] [--unrepeatable] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal

from distributed.core import rpc

import areal_flow
from areal_flow.cluster.certificates import connection_security
from areal_flow.config.cluster import NetworkSettings
from areal_flow.flow.recovery.replay import replay_step
from areal_flow.policy.checkpoints import list_checkpoints, read_forks
from tests.struck_run import DriverEnded, StruckRun
from tests.unrepeatable_trainer import write_patch

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
    "cluster.heartbeat-timeout-s": "3",
    "rewards": '[{verifier = "tests.integration.verifiers:reward_short"}]',
    "tracking.enabled": "false",
}
LAST_STEPS = 3


@dataclass(frozen=True, slots=True)
class Strike:
    """What happens to which process, and when."""

    victim: Victim
    hang: bool
    moment: Moment
    delay_s: float


def draw_strike(randomness: random.Random) -> Strike:
    """Return a random strike; drivers are struck most often, since they matter most."""
    victims: list[Victim] = ["driver", "driver", "driver", "scheduler", "generator", "generator"]
    victim = randomness.choice([*victims, "trainer", "trainer", "reward"])
    moments: list[Moment] = ["any", "any", "commit", "append", "checkpoint"]
    if victim in ("driver", "trainer"):
        moments.append("start")
    hang = victim != "scheduler" and randomness.random() < 0.4
    return Strike(victim, hang, randomness.choice(moments), randomness.uniform(0.0, 3.0))


@dataclass
class Chaos:
    """Strikes at one run."""

    run: StruckRun
    randomness: random.Random
    say: Callable[[str], None]
    strikes: Counter[str] = field(default_factory=Counter)
    num_quarantines: int = 0

    def survive(self, num_strikes: int) -> None:
        """Strike this many times; the run must go on after each strike."""
        strikes = [draw_strike(self.randomness) for _ in range(num_strikes)]
        for number, strike in enumerate(strikes, 1):
            self.say(f"strike {number}: {strike}, at step {self.run.head()}")
            try:
                self._strike(strike)
            except DriverEnded:
                if not self.run.driver_quarantined_a_worker():
                    raise
                self.num_quarantines += 1
                self.run.audit()
                self.run.resume()
            self.strikes[f"{strike.victim} {'hung' if strike.hang else 'killed'}"] += 1

    def finish(self) -> int:
        """Stop the last driver; return its exit code."""
        self.run.wake_hung_drivers()
        self.run.wait_for_steps(LAST_STEPS, "the last steps")
        code = self.run.stop()
        self.run.audit()
        return code

    def _strike(self, strike: Strike) -> None:
        if strike.moment != "start":
            self.run.wait_for_steps(1, "a step")
        if strike.victim == "driver":
            self._strike_driver(strike)
            return
        self._wait_for_moment(strike)
        if strike.victim == "scheduler":
            asyncio.run(_end_scheduler(*self.run.scheduler()))
            is_gone = self.run.driver_is_gone
            self.run.wait_until(is_gone, "the driver to notice that its scheduler is gone")
            self.run.audit()
            self.run.resume()
            return
        worker = self.randomness.choice(self.run.live_workers(strike.victim))
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGSTOP if strike.hang else signal.SIGKILL)
        self.run.audit()

    def _strike_driver(self, strike: Strike) -> None:
        if strike.moment == "start":
            self.run.kill_driver()
            self.run.restart()
        self._wait_for_moment(strike)
        if strike.hang:
            self.run.take_over()
            if self.randomness.random() < 0.7:
                self.run.wake_hung_drivers()
            self.run.audit()
            return
        self.run.kill_driver()
        self.run.audit()
        self.run.resume()

    def _wait_for_moment(self, strike: Strike) -> None:
        sleep(strike.delay_s)
        layout = self.run.layout
        changing = {
            "commit": lambda: _names(layout.trajectories / "data"),
            "append": lambda: _names(layout.steps / "data"),
            "checkpoint": lambda: bool(list(layout.checkpoints.glob(".partial-*"))),
        }.get(strike.moment)
        if changing is None:
            return
        before, until = changing(), monotonic() + 10
        while changing() == before and monotonic() < until:
            sleep(0.002)


def _names(folder: Path) -> frozenset[str]:
    return frozenset(path.name for path in folder.iterdir())


async def _end_scheduler(address: str, network: NetworkSettings) -> None:
    security = connection_security(network).get_connection_args("client")
    with suppress(OSError, RuntimeError):  # whatever the scheduler says as it ends
        async with rpc(address, connection_args=security) as scheduler:
            await scheduler.terminate()


def run_chaos(
    root: Path,
    *,
    num_strikes: int,
    seed: int,
    num_generators: int = 2,
    unrepeatable: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Strike a run `num_strikes` times; return the report.

    Args:
        unrepeatable: its trainer makes other bits each time, so each loss of one is a fork.

    Raises:
        AssertionError: something was lost, or the run did not go on.
    """
    run = StruckRun(root, *([write_patch(root / "unrepeatable")] if unrepeatable else []))
    chaos = Chaos(run, random.Random(seed), say)
    began = monotonic()
    try:
        run.begin({**SETTINGS, "cluster.num-generators": str(num_generators)})
        chaos.survive(num_strikes)
        code = chaos.finish()
        seconds = monotonic() - began
        steps = areal_flow.open_run(run.layout.root).steps("arrow").sort_by("step").to_pylist()
        say(f"replaying {len(steps) - 1} steps from step 0")
        last = replay_step(run.layout, step=len(steps) - 1, from_checkpoint=0)
    except BaseException:
        say("what the drivers said last:\n" + run.log.read_text()[-4000:])
        raise
    finally:
        run.close()
    trained = Counter(identifier for row in steps for identifier in row["trajectory_ids"])
    return {
        "strikes": dict(sorted(chaos.strikes.items())),
        "num_strikes": num_strikes,
        "num_drivers": run.num_drivers,
        "num_quarantines": chaos.num_quarantines,
        "num_refused_drivers": run.num_refused_drivers,
        "num_audits": run.num_audits,
        "num_steps": len(steps) - 1,
        "num_weights": len({row["weights_hash"] for row in steps}),
        "num_checkpoints": len(list_checkpoints(run.layout.checkpoints)),
        "num_committed": len(run.committed),
        "num_trained": len(trained),
        "num_trained_twice": sum(count > 1 for count in trained.values()),
        "final_exit_code": code,
        "recorded_weights_hash": steps[-1]["weights_hash"],
        "num_forked_steps": len(read_forks(run.layout.forks)),
        "num_refused_replays": len(last.refused),
        "replayed_weights_hash": last.replayed.hashes.weights_hash,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strikes", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unrepeatable", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="areal-flow-chaos-") as scratch:
        report = run_chaos(
            Path(scratch),
            num_strikes=arguments.strikes,
            seed=arguments.seed,
            unrepeatable=arguments.unrepeatable,
        )
    for name, value in report.items():
        print(f"{name}: {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
