"""A shipped job with several seeds: held-out pass rate before and after, time, staleness.

    python -m benchmarks.default_job [--recipe calculator] [--seeds 0 1 2] [--runs DIR]

Runs that are in DIR already (`seed0`, `seed1`, ...) are read, not run again.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import areal_flow
from benchmarks import harness

DEFAULT = "arithmetic"
SECONDS = ("seconds_total", "seconds_first_policy", "seconds_training")
SHARES = ("staleness_mean", "staleness_max", "masked_fraction", "overlap_efficiency")


def row_of(runs: Path, recipe: str, seed: int) -> dict[str, Any]:
    """Return figures of a run, which is trained first if it is not there."""
    path = runs / (f"seed{seed}" if recipe == DEFAULT else f"{recipe}-seed{seed}")
    if not (path / "summary.json").is_file():
        options = harness.flags({"name": path.name, "seed": seed})
        subprocess.run([*harness.CLI, "--runs", str(runs), "train", recipe, *options], check=True)
    summary = areal_flow.open_run(path).summary()
    before, after = summary["held_out_before"], summary["held_out_after"]
    points = 100 * (after["pass_rate"] - before["pass_rate"])
    rates = {"before": interval(before), "after": interval(after), "points": points}
    return {"seed": seed, **rates, **{name: summary[name] for name in (*SECONDS, *SHARES)}}


def interval(rate: dict[str, float]) -> str:
    """Return a pass rate with its 95% Wilson interval."""
    return "{pass_rate:.3f} [{pass_rate_low:.3f}, {pass_rate_high:.3f}]".format(**rate)


def main() -> None:
    chosen = harness.parse_options(__doc__, recipe=DEFAULT, seeds=[0, 1, 2], runs=Path("runs"))
    rows = [row_of(chosen.runs, chosen.recipe, seed) for seed in chosen.seeds]
    harness.report(chosen.json, {f"The job {chosen.recipe}: held-out pass rates": rows})


if __name__ == "__main__":
    main()
