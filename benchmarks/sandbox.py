"""Runs of model-written code: how many a second, what one costs, and what hostile ones add.

python -m benchmarks.sandbox [--seconds 5] [--json]

Costs are processor time of this process, its zygotes and their runs; kernel threads that clean up
namespaces are not in it. A slow run of a hostile program ends at `--cpu-s`, or at three times that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from areal_flow.rewards.code.sandbox.grading import grade
from areal_flow.rewards.code.sandbox.limits import Limits, SandboxError
from areal_flow.rewards.code.sandbox.pool import SandboxPool
from areal_flow.rewards.code.sandbox.self_test import choose_tier
from areal_flow.rewards.code.sandbox.zygote_client import available_tiers
from tests.sandbox.corpus import CORPUS, HONEST, Case
from tests.sandbox.judging import Surroundings, living_below, runs_here, surroundings, task_of

HOSTILE_SHARE = 0.2
NUM_IDLE_RUNS = 200
NUM_THREADS = 32


def main() -> None:
    """Measure each tier that passes its self-test here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--cpu-s", type=float, default=1.0, help="limit of processor time of a run")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = [measure(tier, given.seconds, Limits(cpu_s=given.cpu_s)) for tier in available_tiers()]
    if given.json:
        print(json.dumps({"cores": len(os.sched_getaffinity(0)), "tiers": found}))
        return
    for tier in found:
        print("  ".join(f"{name} {value}" for name, value in tier.items()))


def measure(tier: str, seconds: float, limits: Limits) -> dict[str, Any]:
    """Return what runs of one tier cost: alone, side by side, and with hostile ones among them."""
    try:
        choose_tier((tier,))
    except SandboxError as error:
        return {"tier": tier, "refused": str(error)}
    plain = [case for case in HONEST if case.name == "stdin plain"]
    hostile = [case for case in CORPUS if case not in HONEST and runs_here(case)]
    with tempfile.TemporaryDirectory() as folder, surroundings(Path(folder)) as around:
        idle = measure_idle(tier, limits, plain[0], around)
        crowd = measure_many(tier, limits, seconds, around, plain, [])
        mixed = measure_many(tier, limits, seconds, around, plain, hostile)
        return {
            "tier": tier,
            "p50_ms": idle,
            "runs_per_s": crowd["runs_per_s"],
            "cpu_ms_per_run": crowd["cpu_ms_per_run"],
            "runs_per_s_hostile": mixed["runs_per_s"],
            "false_verdicts": crowd["false_verdicts"] + mixed["false_verdicts"],
            "survivors": crowd["survivors"] + mixed["survivors"],
            "escapes": around.escapes(),
        }


def measure_idle(tier: str, limits: Limits, case: Case, around: Surroundings) -> float:
    """Return the median time of a run, one after the other, in milliseconds."""
    pool = SandboxPool(limits, tier=tier)
    task, times = task_of(case, around), []
    for _ in range(NUM_IDLE_RUNS):
        began = time.perf_counter()
        grade(pool, task)
        times.append((time.perf_counter() - began) / len(task.tests))
    pool.close()
    return round(1000 * median(times), 2)


def measure_many(
    tier: str,
    limits: Limits,
    seconds: float,
    around: Surroundings,
    honest: list[Case],
    hostile: list[Case],
) -> dict[str, Any]:
    """Return the rate and the cost of runs side by side; a case of the corpus runs its tests.

    A rate is of programs that were begun in time, until the last of them has ended.
    """
    draw, lock = random.Random(0), threading.Lock()
    num_runs: Counter[str] = Counter()
    used_s, began = _cpu_s(), time.monotonic()
    pool = SandboxPool(limits, tier=tier)

    def judge_until_over(_: int) -> None:
        while time.monotonic() - began < seconds:
            with lock:
                is_hostile = bool(hostile) and draw.random() < HOSTILE_SHARE
                case = draw.choice(hostile if is_hostile else honest)
            task = task_of(case, around)
            verdict = grade(pool, task).verdict
            with lock:
                num_runs["runs"] += len(task.tests) if verdict == "right" else 1
                num_runs["false"] += verdict not in case.verdicts

    num_threads = NUM_THREADS if hostile else 2 * len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(judge_until_over, range(num_threads)))
    lasted_s = time.monotonic() - began
    survivors = len(living_below(pool))
    pool.close()
    return {
        "runs_per_s": round(num_runs["runs"] / lasted_s),
        "cpu_ms_per_run": round(1000 * (_cpu_s() - used_s) / num_runs["runs"], 2),
        "false_verdicts": num_runs["false"],
        "survivors": survivors,
    }


def _cpu_s() -> float:
    """Return the processor time of this process and of those of its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(itertools.chain.from_iterable((u.ru_utime, u.ru_stime) for u in usages))


if __name__ == "__main__":
    main()
