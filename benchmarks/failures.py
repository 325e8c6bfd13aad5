"""Effective training time under failures: a worker is killed in one of ten steps.

One run of the default policy with long steps, all alike, since it learns too slowly to change. The
first steps are left alone; in a share of those after them, drawn at random, a worker is killed
(`kill -9`): generator, trainer and reward worker in turn. The ratio is the time that the later
steps would have taken at the pace of the first ones, over the time that they took: the share of
wall time on steps that survive. The published figure at 10% is 0.80, for machines that fail under
steps of minutes.

    python benchmarks/failures.py [--steps 30] [--undisturbed 10] [--rate 0.1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import areal_flow
from benchmarks.chaos import SETTINGS, Chaos

ROLES = ("generator", "trainer", "reward")
LONG_STEPS = {
    **SETTINGS,
    "controller.batch-size": "4096",
    "controller.group-size": "16",
    "generation.max-num-seqs": "128",
    "warm-start.num-steps": "200",
    "trainer.checkpoint-every-steps": "5",
    "trainer.learning-rate": "1e-9",
}


def measure(root: Path, *, num_undisturbed: int, num_steps: int, rate: float) -> dict[str, Any]:
    randomness = random.Random(0)
    run = Chaos(root, seed=0, num_generators=2, settings=LONG_STEPS, say=print)
    steps = range(num_undisturbed, num_undisturbed + num_steps)
    struck = sorted(randomness.sample(steps, round(rate * num_steps)))
    victims = {step: ROLES[index % len(ROLES)] for index, step in enumerate(struck)}
    try:
        run.begin()
        while run.head() < num_undisturbed:
            sleep(0.05)
        for step in steps:
            if step in victims:
                sleep(randomness.uniform(0, 3))
                strike(run, victims[step])
                print(f"step {step}: killed {victims[step]}", flush=True)
            while run.head() <= step:
                sleep(0.05)
        code = run.finish()
        rows = areal_flow.open_run(run.layout.root).steps("arrow").sort_by("step").to_pylist()
    finally:
        run.close()
    undisturbed = [row["seconds_step"] for row in rows[3 : num_undisturbed + 1]]
    later = rows[num_undisturbed : num_undisturbed + num_steps + 1]
    wall = (later[-1]["committed_at"] - later[0]["committed_at"]).total_seconds()
    return {
        "num_steps": num_steps,
        "rate": rate,
        "killed": victims,
        "undisturbed_step_s": median(undisturbed),
        "disturbed_step_s": wall / num_steps,
        "effective_training_time_ratio": median(undisturbed) * num_steps / wall,
        "exit_code": code,
        "check_is_clean": run.record.is_clean,
    }


def strike(run: Chaos, role: str) -> None:
    with suppress(ProcessLookupError):
        os.kill(run.live_worker(role).pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--undisturbed", type=int, default=10)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="areal-flow-failures-") as scratch:
        found = measure(
            Path(scratch),
            num_undisturbed=arguments.undisturbed,
            num_steps=arguments.steps,
            rate=arguments.rate,
        )
    for name, value in found.items():
        print(f"{name}: {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
