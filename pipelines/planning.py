"""Calibrate the planner to a run, from its ledger and its log alone.

    python -m pipelines.planning RUN FIRST_STEP NUM_GENERATORS

prints how many generators the run should have, calibrated on its steps from FIRST_STEP on, which
had NUM_GENERATORS. The driver runs it as a process, since it must not load torch.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import count
from math import inf
from pathlib import Path

from areal_flow.core.layout import RunLayout
from areal_flow.log.ledger import LedgerReader
from areal_flow.log.queries import Run
from areal_flow.planning.costs import Lengths, Policy, model_config, recorded_lengths
from areal_flow.planning.gpus import gpu_named
from areal_flow.planning.planner import (
    Calibration,
    Job,
    calibrate,
    enough_generators,
    with_cluster,
    without_warm_up,
)


def lengths_of_run(layout: RunLayout, *, since: int = 0) -> Lengths:
    """Read lengths from a run's log, up to the first submission that has not ended.

    Later submissions still lack their long completions.

    Args:
        layout: the run.
        since: the first submission that counts.
    """
    columns, run = ("prompt_tokens", "loss_mask"), Run(layout.root)
    rows = run.trajectories(
        "polars",
        columns=(*columns, "submission_index", "finish_reason"),
        where=f"submission_index >= {since}",
    )
    recent = run.steps(columns=["failed_submissions"], where=f"next_submission_index > {since}")
    failed = {index for each in recent["failed_submissions"] for index in each}
    ended = failed | set(rows["submission_index"])
    first = next(index for index in count(since) if index not in ended)
    end = first if first > since else inf
    rows = rows.filter(rows["submission_index"] < end, rows["finish_reason"] != "error")
    prompts, completions = (rows[column].list.len().to_numpy() for column in columns)
    groups, source = rows["submission_index"].to_numpy(), f"of the log of {layout.name}"
    return recorded_lengths(prompts, completions, source=source, groups=groups)


def job_of_run(layout: RunLayout, *, gpu: str, since: int = 0) -> Job:
    """Return a run's job, with the lengths of its submissions from `since` on."""
    recipe, policy = Run(layout.root).recipe, Policy.of(model_config(str(layout.model)))
    num_gpus = recipe.cluster.num_generators + recipe.cluster.num_trainers
    return Job(recipe, policy, gpu_named(gpu), num_gpus, lengths_of_run(layout, since=since))


def calibrate_run(
    job: Job, layout: RunLayout, *, first_step: int = 1, since: int = 0
) -> Calibration:
    """Calibrate a run's job to its steps from `first_step` on, and its submissions from `since`."""
    run = Run(layout.root)
    columns, where = ("finished_at", "scored_at"), f"submission_index >= {since}"
    times = without_warm_up(run.trajectories("polars", columns=columns, where=where))
    commit_s = (times["scored_at"] - times["finished_at"]).mean().total_seconds()
    steps = run.steps(where=f"step >= {first_step}").to_dict("records")
    return calibrate(job, steps, commit_s=commit_s)


def planned_generators(layout: RunLayout, first_step: int, number: int) -> int:
    """Return the number of generators of the plan; the steps had `number`."""
    cluster = Run(layout.root).recipe.cluster
    assert cluster.generator_range
    before = LedgerReader(layout).row(first_step - 1, ["next_submission_index"])
    since = before["next_submission_index"]
    job = job_of_run(layout, gpu=cluster.autoscale_gpu, since=since)
    job = replace(job, recipe=with_cluster(job.recipe, num_generators=number))
    calibration = calibrate_run(job, layout, first_step=first_step, since=since)
    return enough_generators(
        replace(job, efficiency=calibration.efficiency), cluster.generator_range
    )


if __name__ == "__main__":
    print(planned_generators(RunLayout(Path(sys.argv[1])), *map(int, sys.argv[2:])))
