"""Async against sync: the time of equally many samples.

In virtual time, with the project's own controller and both schedules: batches of 256 in groups of
8, completions of 8,000 tokens in the mean with a heavy tail. Both have the same GPUs and lengths.
In async three of four GPUs generate and staleness is at most 8; in sync all generate, and then all
train. Completions are cut at 65,536 tokens, and one that long takes 330 s alone: sync waits for the
longest of each batch, however many GPUs there are. With completions cut at 31,744 tokens,
`scaling` finds 2.4 to 5.3, and on two real cores `schedule` and `tails` find 1.1 and 1.8
(`docs/benchmarks.md`).
What staleness does to the reward after equally many samples is the page on staleness.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from benchmarks import harness
from benchmarks.plots import draw_estimates
from benchmarks.science import virtual
from benchmarks.science.findings import Estimate, Finding, conclude

OPTIONS = {"seeds": [0, 1, 2], "gpus": [8, 16, 32], "sigma": 1.0, "steps": 24, "skip": 12}
QUICK = {"seeds": [0, 1], "gpus": [8], "steps": 6, "skip": 3}
ETA = 8
SCHEDULES = ("async", "sync")


def measure(schedule: Literal["async", "sync"], num_gpus: int, seed: int, chosen: Any) -> float:
    """Return the virtual seconds of a step."""
    num_trainers = num_gpus // 4 if schedule == "async" else num_gpus
    num_generators = num_gpus - num_trainers or num_gpus
    simulated = virtual.simulated(
        chosen,
        num_generators=num_generators,
        num_trainers=num_trainers,
        eta=ETA,
        seed=seed,
        sigma=chosen.sigma,
        schedule=schedule,
    )
    return simulated.step_s


def run(chosen: Any) -> Finding:
    keys = [(schedule, num) for schedule in SCHEDULES for num in chosen.gpus]
    calls = [(*key, seed, chosen) for key in keys for seed in chosen.seeds]
    environment = {"OMP_NUM_THREADS": "1"}
    turns = iter(harness.in_processes(measure, calls, environment, num_processes=chosen.processes))
    step_times = {key: [next(turns) for _ in chosen.seeds] for key in keys}
    pairs = {
        num: zip(step_times["async", num], step_times["sync", num], strict=True)
        for num in chosen.gpus
    }
    ratios = {
        num: Estimate.of([sync / async_ for async_, sync in times]) for num, times in pairs.items()
    }
    rows = [
        {
            "GPUs": num,
            "async, s a step": Estimate.of(step_times["async", num]).text(1),
            "sync, s a step": Estimate.of(step_times["sync", num]).text(1),
            "sync over async": ratios[num].text(2),
        }
        for num in chosen.gpus
    ]
    conclusions = [
        conclude(f"{num} GPUs: time of sync over async", ratio, nothing=1.0, num_decimals=2)
        for num, ratio in ratios.items()
    ]
    lines = {
        "sync over async": {f"{num}": (times.mean, times.half) for num, times in ratios.items()}
    }
    draw = partial(draw_estimates, lines, x="GPUs", y="time of sync over async")
    title = f"Virtual seconds a step, steps {chosen.skip + 1} to {chosen.steps}"
    return Finding({title: rows}, conclusions, draw)
