"""A shipped job with several seeds: held-out pass rate before and after, time, staleness.

`--ways` are ways to train it: `async` with one generator beside one trainer thread, `sync` with two
of both, which take turns, and `drain`, async whose generators finish what they have begun before
they take new weights. `--target` adds how many seconds of training each run took to that held-out
pass rate, on a line between the evaluations around it.

    python -m benchmarks.default_job [--recipe NAME] [--model DIR] [--seeds 0 1 2] [--runs DIR]
        [--ways async sync drain] [--target 0.5]

Runs that are in DIR already (`seed0`, `seed1`, ...) are read, those that were stopped are resumed.
"""

from __future__ import annotations

import subprocess
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import areal_flow
from areal_flow.core.pass_rates import PASS_THRESHOLD
from areal_flow.log.queries import Run
from benchmarks import harness
from benchmarks.schedule import NUM_GENERATORS, TRAINERS

DEFAULT = "arithmetic"
WAYS: dict[str, dict[str, object]] = {
    "async": {},
    "sync": {
        "schedule": "sync",
        "cluster.num-generators": NUM_GENERATORS["sync"],
        TRAINERS["threads"]: NUM_GENERATORS["sync"],
    },
    "drain": {"generation.interruption": "drain"},
}
SECONDS = ("total_s", "first_policy_s", "training_s")
SHARES = ("staleness_mean", "staleness_max", "masked_fraction", "overlap_efficiency")
Curve = list[tuple[float, float]]
"""Seconds of training, and the held-out pass rate then."""


def run_of(chosen: Any, way: str, seed: int) -> Run:
    """Return a finished run; train or resume it if necessary."""
    parts = (chosen.recipe, way, f"seed{seed}")
    path = chosen.runs / "-".join(part for part in parts if part not in (DEFAULT, "async"))
    if not (path / "summary.json").is_file():
        settings = {"name": path.name, "seed": seed, **WAYS[way]}
        settings |= {"model": chosen.model.resolve()} if chosen.model else {}
        is_new = not (path / "config.toml").is_file()
        options = [chosen.recipe, *harness.flags(settings)] if is_new else ["--resume", path.name]
        command = [*harness.CLI, "--runs", str(chosen.runs), "train", *options]
        subprocess.run(command, check=True)
    return areal_flow.open_run(path)


def row_of(run: Run, target: float) -> dict[str, Any]:
    summary, curve = run.summary(), curve_of(run)
    before, after = summary["held_out_before"], summary["held_out_after"]
    rates = {"before": interval(before), "after": interval(after)}
    gain = {"points": 100 * (after["pass_rate"] - before["pass_rate"])}
    lengths = {f"tokens_{when}": summary[f"held_out_{when}"]["mean_tokens"] for when in rates}
    to_target = {f"to_{target}_s": seconds_to(curve, target)} if target else {}
    shares = {name: summary[name] for name in (*SECONDS, *SHARES)}
    return {"run": run.layout.name, **rates, **gain, **lengths, **to_target, **shares}


def curve_of(run: Run) -> Curve:
    """Return the held-out pass rates of a run, in the order of its steps."""
    step_s = run.steps(columns=["step", "step_s"]).set_index("step").step_s.fillna(0)
    answers = run.evaluations(columns=["evaluation", "policy_version", "reward"])
    passed = answers.assign(passed=answers.reward > PASS_THRESHOLD).groupby("policy_version").passed
    return [(float(step_s.loc[:version].sum()), rate) for version, rate in passed.mean().items()]


def seconds_to(curve: Curve, target: float) -> float:
    """Return when an interpolated curve first reaches a pass rate; inf if it never does."""
    for (start_s, start), (end_s, end) in pairwise([(0.0, 0.0), *curve]):
        if end >= target:
            return start_s + (target - start) / (end - start) * (end_s - start_s)
    return inf


def interval(rate: dict[str, float]) -> str:
    """Return a pass rate with its 95% interval."""
    return "{pass_rate:.3f} [{pass_rate_low:.3f}, {pass_rate_high:.3f}]".format(**rate)


def main() -> None:
    defaults = {
        "recipe": DEFAULT,
        "seeds": [0, 1, 2],
        "runs": Path("runs"),
        "ways": ["async"],
        "target": 0.0,
    }
    chosen = harness.parse_options(__doc__, choices={"ways": WAYS}, model=Path, **defaults)
    rows = {
        way: [row_of(run_of(chosen, way, seed), chosen.target) for seed in chosen.seeds]
        for way in chosen.ways
    }
    title = f"The job {chosen.recipe}: held-out pass rates"
    harness.report(chosen.json, {title: [row for of_way in rows.values() for row in of_way]})
    for way, of_way in rows.items() if chosen.target else ():
        seconds = [row[f"to_{chosen.target}_s"] for row in of_way]
        spread = f" +- {stdev(seconds):.0f}" if len(seconds) > 1 else ""
        print(f"{way}: {fmean(seconds):.0f}{spread} s of training to {chosen.target}")


if __name__ == "__main__":
    main()
