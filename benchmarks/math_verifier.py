"""The verifier `math`: whether it agrees with labels, and what a verdict takes.

python -m benchmarks.math_verifier [--labels FILE] [--seconds 5] [--json]

Labels are rows of JSONL with `completion`, `reference` and `is_correct`, or the file
`example_model_solutions.jsonl` that OpenAI published with GSM8K (5,276 answers of four models).
Every other figure is of answers that need algebra, on two processes. With hanging answers, one at a
time of those hangs until its limit of processor time ends it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from statistics import quantiles
from typing import Any

import psutil

from areal_flow.rewards.math.processes import MathPool
from areal_flow.rewards.math.reward import judge
from tests.math_corpus import ALGEBRA, EXPLOSIVE

SAMPLE = Path(__file__).parents[1] / "tests" / "data" / "gsm8k" / "model_answers.jsonl"
NUM_PROCESSES = 2


def main() -> None:
    """Measure agreement, rates and times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--labels", type=Path, default=SAMPLE)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    pool = MathPool(NUM_PROCESSES)
    honest = [(rf"\boxed{{{answer}}}", reference) for answer, reference, _ in ALGEBRA]
    hanging = [(rf"\boxed{{{answer}}}", "5") for answer in EXPLOSIVE]
    measure(pool, 1.0, honest, [])  # starts the processes
    found = {
        "labels": agreement(pool, given.labels),
        "algebra": measure(pool, given.seconds, honest, []),
        "algebra, one hangs": measure(pool, given.seconds, honest, hanging),
    }
    pool.close()
    if given.json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        print(f"{name}:", "  ".join(f"{figure} {value}" for figure, value in figures.items()))


def agreement(pool: MathPool, path: Path) -> dict[str, Any]:
    """Return how many labels the verdicts agree with, and the rate in one thread."""
    rows = [*labelled(path)]
    began = time.process_time()
    verdicts = [judge(pool, completion, reference).verdict for completion, reference, _ in rows]
    used_s = time.process_time() - began
    agree = [(v == "right") == row[2] for v, row in zip(verdicts, rows, strict=True)]
    return {
        "answers": len(rows),
        "right": verdicts.count("right"),
        "agreement": round(sum(agree) / len(rows), 4),
        "verdicts_per_cpu_s": round(len(rows) / used_s),
    }


def labelled(path: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield completion, reference and label of each answer in a file."""
    for row in map(json.loads, path.open()):
        if "completion" in row:
            yield row["completion"], row["reference"], row["is_correct"]
            continue
        reference = row["ground_truth"].rpartition("A: ")[2]
        for answer in row.values():
            if isinstance(answer, dict):
                yield answer["solution"], reference, answer["is_correct"]


def measure(
    pool: MathPool, seconds: float, honest: list[tuple[str, Any]], hanging: list[tuple[str, str]]
) -> dict[str, Any]:
    """Return the rate, the times and the cost of honest answers, asked in as many threads as there
    are processes; in one more thread hanging ones are asked.

    A time is that of a verdict, waiting for a process included.
    """
    until, times = time.monotonic() + seconds, []

    def judge_until_over(rows: Iterator[tuple[str, Any]], judged: list[float]) -> None:
        while (began := time.monotonic()) < until:
            judge(pool, *next(rows))
            judged.append(time.monotonic() - began)

    used_s, began = _cpu_s(pool), time.monotonic()
    with ThreadPoolExecutor() as threads:
        if hanging:
            threads.submit(judge_until_over, itertools.cycle(hanging), [])
        rows = [itertools.cycle(honest[place:] + honest[:place]) for place in range(NUM_PROCESSES)]
        wait([threads.submit(judge_until_over, each, times) for each in rows])
        lasted_s, used_s = time.monotonic() - began, _cpu_s(pool) - used_s
    centiles = quantiles(times, n=100)
    return {
        "verdicts_per_s": round(len(times) / lasted_s),
        "p50_ms": round(1000 * centiles[49], 2),
        "p99_ms": round(1000 * centiles[98], 2),
        "cpu_ms": round(1000 * used_s / len(times), 2),
    }


def _cpu_s(pool: MathPool) -> float:
    """Return the processor time of this process, of a pool's, and of their forks."""
    owners = [psutil.Process(pid) for pid in pool.pids]
    forks = [fork for owner in owners for fork in owner.children()]
    usages = [process.cpu_times() for process in (psutil.Process(), *owners, *forks)]
    ended = [owner.cpu_times() for owner in owners]
    return sum(u.user + u.system for u in usages) + sum(
        u.children_user + u.children_system for u in ended
    )


if __name__ == "__main__":
    main()
