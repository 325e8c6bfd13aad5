"""Async against sync on the default job, in one run: a table, and JSON with `--json FILE`.

Both schedules start from the same warm-started policy and see the same prompts. They take turns, so
that a noisy machine is noisy for both. The baseline is fair: with two cores, sync generates on two
generators and then trains with two threads; async has one core for each. Steps before `--skip` are
left out: the policy is learning to write longer answers there.

    python benchmarks/schedule.py [--steps 40] [--skip 15] [--rounds 2] [--json FILE]
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
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

import areal_flow

SCHEDULES = {
    "async": ["--cluster.num-generators", "1", "--cluster.num-trainer-threads", "1"],
    "sync": ["--cluster.num-generators", "2", "--cluster.num-trainer-threads", "2"],
}
NUM_GENERATORS = {"async": 1, "sync": 2}


@dataclass(frozen=True)
class Measurement:
    """Means over the measured steps of one run; seconds and tokens are of one step."""

    schedule: str
    seconds_step: float
    seconds_step_median: float
    seconds_generate: float
    seconds_train: float
    bound_s: float
    overlap_efficiency: float
    tokens_per_second_generated: float
    tokens_per_second_trained: float
    staleness_mean: float
    reward_mean: float


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="areal-flow-bench-") as scratch:
        cwd = Path(scratch)
        model = arguments.model or make_model(cwd)
        measurements = [
            measure(cwd, model, schedule, round_, arguments)
            for round_ in range(arguments.rounds)
            for schedule in SCHEDULES
        ]
    report = {
        "machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}",
        "measurements": [asdict(measurement) for measurement in measurements],
        "speedup": ratio(measurements, "seconds_step"),
        "speedup_median": ratio(measurements, "seconds_step_median"),
    }
    print_table(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skip", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", type=Path, help="start from this directory: no warm start")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def make_model(cwd: Path) -> Path:
    """Warm-start the default job's policy, train it no further, and export it."""
    train(cwd, "warm", ["--num-steps", "0"])
    run_cli(cwd, "export", "warm", "model")
    return (cwd / "model").resolve()


def measure(
    cwd: Path, model: Path, schedule: str, round_: int, arguments: argparse.Namespace
) -> Measurement:
    name = f"{schedule}-{round_}"
    options = ["--schedule", schedule, "--num-steps", str(arguments.steps), "--model", str(model)]
    train(cwd, name, [*options, *SCHEDULES[schedule]])
    steps = areal_flow.open_run(cwd / "runs" / name).steps("arrow").to_pylist()
    rows = [row for row in steps if row["step"] > arguments.skip]
    return summarise(schedule, rows)


def train(cwd: Path, name: str, options: list[str]) -> None:
    quiet = ["--prompts.num-held-out", "0", "--tracking.enabled", "false"]
    run_cli(cwd, "train", "--name", name, *quiet, *options)


def run_cli(cwd: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pipelines.cli.main", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def summarise(schedule: str, rows: list[dict[str, Any]]) -> Measurement:
    def per_step(*columns: str) -> float:
        return mean(sum(row[column] for column in columns) for row in rows)

    seconds = per_step("seconds_step")
    generate = per_step("seconds_generate") / NUM_GENERATORS[schedule]
    trained = per_step("seconds_read", "seconds_train", "seconds_stage")
    bound = max(generate, trained) if schedule == "async" else generate + trained
    return Measurement(
        schedule=schedule,
        seconds_step=seconds,
        seconds_step_median=median(row["seconds_step"] for row in rows),
        seconds_generate=generate,
        seconds_train=trained,
        bound_s=bound,
        overlap_efficiency=max(generate, trained) / seconds,
        tokens_per_second_generated=per_step("num_generated_tokens") / seconds,
        tokens_per_second_trained=per_step("num_trained_tokens") / seconds,
        staleness_mean=per_step("staleness_mean"),
        reward_mean=per_step("reward_mean"),
    )


def ratio(measurements: list[Measurement], column: str) -> float:
    """Return sync's time over async's: above 1, async is quicker."""
    seconds = {
        schedule: mean(getattr(m, column) for m in measurements if m.schedule == schedule)
        for schedule in SCHEDULES
    }
    return seconds["sync"] / seconds["async"]


def print_table(report: dict[str, Any]) -> None:
    table = Table(title=f"One training step of the default job; {report['machine']}")
    labels = {
        "schedule": "schedule",
        "seconds_step": "s/step",
        "seconds_step_median": "median",
        "seconds_generate": "T_gen",
        "seconds_train": "T_train",
        "bound_s": "bound",
        "overlap_efficiency": "overlap eff.",
        "tokens_per_second_generated": "gen tok/s",
        "tokens_per_second_trained": "train tok/s",
        "staleness_mean": "staleness",
        "reward_mean": "reward",
    }
    for label in labels.values():
        table.add_column(label, justify="right")
    for measurement in report["measurements"]:
        cells = [measurement[key] for key in labels]
        table.add_row(*(c if isinstance(c, str) else f"{c:,.2f}" for c in cells))
    Console(width=130).print(table)
    print(f"sync / async, time per step: {report['speedup']:.2f}", end="")
    print(f" (medians: {report['speedup_median']:.2f})")


if __name__ == "__main__":
    main()
