"""Async against sync: time and reward after equally many samples.

The default job from its fine-tuned policy, as `benchmarks/schedule.py` runs it, with a seed's
prompts and samples. With two cores, sync generates on two generators and then trains with two
threads; async has one generator beside one trainer, and a staleness of at most 2. Time is of a
step, without the first ones, and reward the mean of the last steps.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.plots import draw_bars
from benchmarks.schedule import NUM_GENERATORS, make_warm_model, measure
from benchmarks.science.findings import Estimate, Finding, conclude, difference

OPTIONS = {"seeds": [0, 1, 2], "steps": 14, "skip": 6, "model": Path}
QUICK = {"seeds": [0, 1], "steps": 3, "skip": 1}
COLUMNS = ("step_s", "reward", "staleness", "generated_tokens_per_s")


def run(chosen: Any) -> Finding:
    options = Namespace(steps=chosen.steps, skip=chosen.skip, sync_trainer="threads")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in NUM_GENERATORS}
    with tempfile.TemporaryDirectory(prefix="areal-flow-science-") as scratch:
        cwd = Path(scratch)
        model = (chosen.model or make_warm_model(cwd)).resolve()
        for seed in chosen.seeds:
            for schedule, turns in found.items():
                settings = {"model": model, "seed": seed, "prompts.num-prompts": 4000}
                turns.append(measure(cwd, schedule, settings, options))
    of = {
        name: {column: [turn[column] for turn in turns] for column in COLUMNS}
        for name, turns in found.items()
    }
    ratios = [
        sync / async_
        for sync, async_ in zip(of["sync"]["step_s"], of["async"]["step_s"], strict=True)
    ]
    speed, reward = Estimate.of(ratios), difference(of["sync"]["reward"], of["async"]["reward"])
    what = "time of a step, sync over async"
    said = [
        conclude(what, speed, nothing=1.0, num_decimals=2),
        conclude("mean reward, async less sync", reward),
    ]
    rows = [
        {"schedule": name, **{column: Estimate.of(each).text() for column, each in columns.items()}}
        for name, columns in of.items()
    ]
    bars = {f"seed {seed}": (each, 0.0) for seed, each in zip(chosen.seeds, ratios, strict=True)}
    draw = partial(draw_bars, bars | {"mean": (speed.mean, speed.half)}, x=what, none=1.0)
    return Finding({f"Means over steps {chosen.skip + 1} to {chosen.steps}": rows}, said, draw)
