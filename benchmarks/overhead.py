"""Processor seconds of a step by role, for completions and groups of several sizes.

Each line is a short run of `areal-flow train`, its rows those of the default job: the real thing,
with a small policy that never stops by itself, so that every completion has the same length. The
time that each process has used is read four times a second, and laid over the times at which the
ledger's rows were committed. The first steps are left out.

    python benchmarks/overhead.py [--steps 12] [--skip 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from time import sleep, time

import numpy as np
import psutil
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import areal_flow
from benchmarks.endless_policy import write_endless_policy

PROMPT_ROOM = 32
DRIVER = "driver"
ROLES = (DRIVER, "reward", "generator", "trainer")


@dataclass(frozen=True)
class Shape:
    """What a step consists of."""

    num_tokens: int
    group_size: int
    batch_size: int


SHAPES = (
    Shape(8, 16, 512),
    Shape(8, 8, 512),
    Shape(8, 64, 512),
    Shape(512, 8, 128),
    Shape(512, 64, 128),
    Shape(4096, 8, 64),
    Shape(4096, 64, 64),
)


@dataclass(frozen=True)
class Measurement:
    """Means over the measured steps of one run, in seconds."""

    shape: Shape
    seconds_step: float
    processor_s: dict[str, float]

    @property
    def overhead_s(self) -> float:
        """What neither generates nor trains."""
        return self.processor_s[DRIVER] + self.processor_s["reward"]

    @property
    def overhead_ms_per_trajectory(self) -> float:
        return 1e3 * self.overhead_s / self.shape.batch_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=4)
    parser.add_argument("--shapes", type=int, nargs="+", default=range(len(SHAPES)))
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="areal-flow-bench-") as scratch:
        model = Path(scratch) / "model"
        longest = max(shape.num_tokens for shape in SHAPES)
        write_endless_policy(model, max_model_len=longest + PROMPT_ROOM)
        found = [
            measure(Path(scratch), model, SHAPES[index], arguments.steps, arguments.skip)
            for index in arguments.shapes
        ]
    machine = f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}"
    print_table(found, machine)
    if arguments.json:
        lines = [asdict(m) | {"overhead_s": m.overhead_s} for m in found]
        arguments.json.write_text(json.dumps({"machine": machine, "runs": lines}, indent=2) + "\n")


def measure(cwd: Path, model: Path, shape: Shape, num_steps: int, skip: int) -> Measurement:
    name = f"{shape.num_tokens}-{shape.group_size}"
    command = [sys.executable, "-m", "pipelines.cli.main", "train", "--name", name]
    driver = subprocess.Popen(
        [*command, "--model", str(model), "--num-steps", str(num_steps), *options(shape)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    samples: list[dict[str, float]] = []
    while driver.poll() is None:
        samples.append({"at": time(), **processor_s(driver.pid)})
        sleep(0.25)
    if driver.returncode:
        sys.exit(f"{name} failed:\n{driver.communicate()[0]}")
    steps = areal_flow.open_run(cwd / "runs" / name).steps("arrow").to_pylist()
    at = {row["step"]: row["committed_at"].timestamp() for row in steps}
    moments, num_measured = [at[skip], at[num_steps]], num_steps - skip
    used = {
        role: np.diff(np.interp(moments, *known(samples, role)))[0] / num_measured for role in ROLES
    }
    return Measurement(shape, (moments[1] - moments[0]) / num_measured, used)


def options(shape: Shape) -> list[str]:
    """Return a run's settings; whatever else belongs to the default job stays as it is."""
    max_model_len = shape.num_tokens + PROMPT_ROOM
    settings = {
        "sft.num-steps": 0,
        "prompts.num-held-out": 0,
        "generation.max-new-tokens": shape.num_tokens,
        "generation.max-model-len": max_model_len,
        "generation.max-num-seqs": min(128, shape.batch_size),
        "controller.group-size": shape.group_size,
        "controller.batch-size": shape.batch_size,
        "algorithm.num-minibatches": min(2, shape.batch_size // shape.group_size),
        "trainer.tokens-per-micro-batch": max(8192, max_model_len),
        "trainer.learning-rate": 1e-6,
    }
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def processor_s(driver: int) -> dict[str, float]:
    """Return the processor seconds of each role so far."""
    used = dict.fromkeys(ROLES, 0.0)
    try:
        process = psutil.Process(driver)
        roles = [(DRIVER, process), *((role_of(p), p) for p in process.children())]
        for role, member in roles:
            times = member.cpu_times()
            used[role] = used.get(role, 0.0) + times.user + times.system
    except psutil.Error:
        return {}
    return used


def role_of(process: psutil.Process) -> str:
    """Return the role of a worker, which its command line names."""
    words = " ".join(process.cmdline())
    named = (role for role in ROLES if f"worker_process {role}" in words or f'"{role}-' in words)
    return next(named, "other")


def known(samples: list[dict[str, float]], role: str) -> tuple[list[float], NDArray[np.float64]]:
    """Return when a role's processor time was read, and what it was: it stays when all end."""
    read = [sample for sample in samples if role in sample]
    return [sample["at"] for sample in read], np.maximum.accumulate([s[role] for s in read])


def print_table(found: list[Measurement], machine: str) -> None:
    table = Table(title=f"Processor seconds of a step; {machine}")
    for label in ("tokens", "group", "batch", "s/step", *ROLES, "overhead, s", "ms/trajectory"):
        table.add_column(label, justify="right")
    for m in found:
        sizes = (m.shape.num_tokens, m.shape.group_size, m.shape.batch_size)
        seconds = (m.seconds_step, *(m.processor_s[role] for role in ROLES), m.overhead_s)
        cells = [f"{size:,}" for size in sizes] + [f"{value:.3f}" for value in seconds]
        table.add_row(*cells, f"{m.overhead_ms_per_trajectory:.3f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
