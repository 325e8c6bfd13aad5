"""Async against sync on the default job, in one run: a table, JSON with `--json`, a plot.

`schedule_comparison` says what is measured. Both schedules start from the same warm-started policy.
Steps before `--skip` are left out: the policy is learning to write longer answers there.

    python benchmarks/schedule.py [--steps 40] [--skip 15] [--rounds 2] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.schedule_comparison import Job, compare_schedules, run_cli, train


def make_model(cwd: Path) -> Path:
    """Warm-start the default job's policy, train it no further, and export it."""
    train(cwd, "warm", ["--num-steps", "0"])
    run_cli(cwd, "export", "warm", "model")
    return cwd / "model"


if __name__ == "__main__":
    job = Job(
        "the default job",
        make_model,
        num_steps=40,
        num_skipped=15,
        num_rounds=2,
        sync_trainer="threads",
    )
    compare_schedules(job, __doc__)
