"""Does a plan calibrated to one run predict runs with other settings?

Each round trains the job as it is, and with each change; the plan is calibrated to the first run,
and its prediction of the others is compared with them. `load` is the default job (from a model that
is fine-tuned already) or that of `benchmarks.tails`. Trainer and generator have a core each, so
other work on the machine is in every figure.

    python -m benchmarks.calibration [--load default] [--model DIR] [--steps 32] [--rounds 1]
        [--folder DIR] [--json FILE]
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from areal_flow.log.queries import Run
from areal_flow.planning.planner import Job, simulate_steps, without_warm_up
from benchmarks import harness, schedule, tails
from pipelines.planning import calibrate_run, job_of_run

LOADS = {
    "default": (schedule.make_warm_model, {}),
    "tails": (tails.make_model, tails.SETTINGS),
}
CHANGES: dict[str, dict[str, dict[str, object]]] = {
    "default": {
        "half the batch": {"controller.batch-size": 256},
        "eta 1": {"controller.max-staleness": 1},
    },
    "tails": {
        "half the batch": {"controller.batch-size": 32},
        "eta 3": {"controller.max-staleness": 3},
    },
}


def compare(name: str, run: Run, job: Job) -> dict[str, Any]:
    steps = run.steps("arrow", where="step > 0").to_pylist()
    plan = simulate_steps(run.recipe, job.costs(run.recipe), job.lengths, len(steps))
    rows: dict[str, Any] = {"run": name}
    for key, column, predicted in (
        ("step_s", "step_s", plan.step_s),
        ("staleness", "staleness_mean", plan.staleness_mean),
    ):
        measured = fmean(row[column] for row in without_warm_up(steps))
        error = f"{predicted / measured - 1:+.0%}"
        rows |= {key: measured, f"{key}_predicted": predicted, f"{key}_error": error}
    train_s = fmean(row["train_s"] for row in without_warm_up(steps))
    return rows | {"train_s": train_s, "train_s_predicted": plan.train_s}


def main() -> None:
    defaults = {"load": "default", "steps": 32, "rounds": 1, "model": Path, "folder": Path}
    chosen = harness.parse_options(__doc__, choices={"load": LOADS}, **defaults)
    make_model, settings = LOADS[chosen.load]
    rows = []
    with tempfile.TemporaryDirectory(prefix="areal-flow-bench-") as scratch:
        cwd = chosen.folder or Path(scratch)
        model = (chosen.model or make_model(cwd)).resolve()
        common = {"model": model, "sft.num-steps": 0, "num-steps": chosen.steps, **settings}
        changes = {"as it is": {}, **CHANGES[chosen.load]}
        for turn in range(chosen.rounds):
            runs = {
                name: harness.train(cwd, f"{turn}-{name}".replace(" ", "-"), common | changed)
                for name, changed in changes.items()
            }
            layout = runs["as it is"].layout
            job = job_of_run(layout, gpu="CPU")
            job = replace(job, efficiency=calibrate_run(job, layout).efficiency)
            print(job.efficiency)
            rows += [compare(name, run, job) for name, run in runs.items()]
    harness.report(chosen.json, {f"{chosen.load}: calibrated to the run as it is": rows})


if __name__ == "__main__":
    main()
