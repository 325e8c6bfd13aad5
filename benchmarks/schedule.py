"""Async against sync on the default job: same first policy, same prompts, taking turns.

With two cores, sync generates on two generators and then trains with two threads or two ranks
(`--sync-trainer`); async has one generator beside one trainer. Steps before `--skip` are left out:
the policy is learning to write longer answers there. Figures are means of one step:

    generate_s    busy time of a generator, the mean of all generators
    train_s       reading, gradients and staging
    bound_s       of async the larger of both, of sync their sum
    straggling_s  of sync: a batch's rollouts from first to last, beyond `generate_s`

    python -m benchmarks.schedule [--steps 40] [--skip 15] [--rounds 2] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean, mean, median
from typing import Any

from areal_flow.log.queries import Run
from benchmarks import harness
from benchmarks.plots import draw_schedules

NUM_GENERATORS = {"async": 1, "sync": 2}  # each has a core
TRAINERS = {"threads": "cluster.num-trainer-threads", "ranks": "cluster.num-trainers"}
"""What gives a trainer several cores."""


def make_warm_model(cwd: Path) -> Path:
    """Fine-tune the default policy and export it without further training."""
    harness.train(cwd, "warm", {"num-steps": 0})
    harness.output_of([*harness.CLI, "export", "warm", "model"], cwd=cwd)
    return cwd / "model"


def compare_schedules(
    doc: str | None,
    title: str,
    make_model: Callable[[Path], Path],
    settings: Mapping[str, object],
    **defaults: Any,
) -> None:
    """Measure both schedules, each starting from the model that `make_model` writes."""
    choices = {"sync_trainer": TRAINERS}
    chosen = harness.parse_options(doc, choices=choices, **defaults, plot=Path)
    with tempfile.TemporaryDirectory(prefix="areal-flow-bench-") as scratch:
        cwd = Path(scratch)
        settings = {"model": make_model(cwd).resolve(), **settings}
        ways = {name: partial(measure, cwd, name, settings, chosen) for name in NUM_GENERATORS}
        measured = harness.take_turns(chosen.rounds, ways)

    def ratio(column: str) -> float:
        sync, async_ = (mean(turn[column] for turn in measured[name]) for name in ("sync", "async"))
        return float(sync / async_)

    rows = [row for turns in zip(*measured.values(), strict=True) for row in turns]
    harness.report(chosen.json, {f"One training step of {title}": rows})
    print(f"sync / async, time per step: {ratio('step_s'):.2f}", end="")
    print(f" (medians: {ratio('median_s'):.2f}; bounds: {ratio('bound_s'):.2f})")
    print(f"async / sync, generated tokens/s: {1 / ratio('generated_tokens_per_s'):.2f}")
    if chosen.plot:
        draw_schedules(title, rows, chosen.plot)


def measure(
    cwd: Path, schedule: str, settings: Mapping[str, object], chosen: argparse.Namespace
) -> dict[str, Any]:
    """Return means over the measured steps of one run; seconds and tokens are of one step."""
    num_cores = NUM_GENERATORS[schedule]
    cores = {"cluster.num-generators": num_cores, TRAINERS[chosen.sync_trainer]: num_cores}
    own = {"schedule": schedule, "num-steps": chosen.steps, **cores}
    run = harness.train(cwd, f"{schedule}-{len(list(cwd.glob('runs/*')))}", {**own, **settings})
    rows = harness.steps_after(run, chosen.skip)

    def per_step(*columns: str) -> float:
        return fmean(sum(row[column] for column in columns) for row in rows)

    step_s, generate_s = per_step("step_s"), per_step("generate_s") / num_cores
    train_s = per_step("read_s", "train_s", "stage_s")
    is_sync, masked = schedule == "sync", per_step("num_masked_tokens")
    return {
        "schedule": schedule,
        "step_s": step_s,
        "median_s": median(row["step_s"] for row in rows),
        "generate_s": generate_s,
        "train_s": train_s,
        "bound_s": generate_s + train_s if is_sync else max(generate_s, train_s),
        "straggling_s": rollout_s(run, chosen.skip) - generate_s if is_sync else 0.0,
        "overlap_efficiency": max(generate_s, train_s) / step_s,
        "generated_tokens_per_s": per_step("num_generated_tokens") / step_s,
        "trained_tokens_per_s": per_step("num_trained_tokens") / step_s,
        "completion_tokens": per_step("completion_tokens_mean"),
        "staleness": per_step("staleness_mean"),
        "masked_fraction": masked / (masked + per_step("num_trained_tokens")),
        "reward": per_step("reward_mean"),
    }


def rollout_s(run: Run, num_skipped: int) -> float:
    """Return the time from the start of a step's first rollout to the end of its last."""
    columns = ("step", "started_at", "finished_at")
    rollouts = run.trajectories(columns=columns, where=f"step > {num_skipped}", text=True)
    by_step = rollouts.groupby("step")
    lasted = by_step.finished_at.max() - by_step.started_at.min()
    return float(lasted.dt.total_seconds().mean())


if __name__ == "__main__":
    defaults = {"steps": 40, "skip": 15, "rounds": 2, "sync_trainer": "threads"}
    compare_schedules(__doc__, "the default job", make_warm_model, {}, **defaults)
