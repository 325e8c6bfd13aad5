"""The README's picture, of a finished run: what it learned, and generation beside training.

A group has the colour of the oldest version that sampled it; a step, of that which it starts from.

    python -m benchmarks.readme_picture runs/NAME docs/images/run.png
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

import areal_flow

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756")
NUM_STEPS = 5


def draw_learning(axes: Any, steps: Any) -> None:
    axes.plot(steps.step, steps.reward_mean, color=COLOURS[0], lw=2.5, label="mean reward")
    axes.plot(steps.step, steps["rollout/pass_rate"], color=COLOURS[1], ls="--", label="pass rate")
    axes.set(xlabel="training step", ylim=(0, 1), title="What the policy learns")
    axes.legend(loc="lower right", frameon=False)


def draw_overlap(axes: Any, steps: Any, groups: Any) -> None:
    """Draw what generators and trainer do in the middle of a run, in seconds."""
    shown = steps.iloc[len(steps) // 2 :][: NUM_STEPS + 1]
    began, ended = shown.committed_at.iloc[0], shown.committed_at.iloc[-1]
    lanes: list[Any] = []
    for group in groups[(groups.ended >= began) & (groups.began <= ended)].itertuples():
        free = (lane for lane, until in enumerate(lanes) if until <= group.began)
        lane = next(free, len(lanes))
        lanes[lane : lane + 1] = [group.ended]
        start, length = (group.began - began).total_seconds(), group.ended - group.began
        bar = (max(start, 0), length.total_seconds() + min(start, 0))
        axes.broken_barh([bar], (2 + lane, 0.7), color=COLOURS[group.version % len(COLOURS)])
    height = max(2, len(lanes) // 3)
    for step in shown.iloc[1:].itertuples():
        end = (step.committed_at - began).total_seconds()
        start = end - step.seconds_train - step.seconds_stage
        colour = COLOURS[step.policy_version % len(COLOURS)]
        axes.broken_barh([(start, end - start)], (-height, height), color=colour)
        middle = ((start + end) / 2, -height / 2)
        axes.text(*middle, step.step, ha="center", va="center", color="white")
        axes.axvline(end, color="black", lw=0.8, ls=":")
        axes.text(end, len(lanes) + 2.3, f"v{step.step}", ha="center")
    ticks = [-height / 2, 2 + len(lanes) / 2]
    axes.set_yticks(ticks, ["trainer:\nsteps", "generator:\ngroups"])
    title = "Generation beside training, a colour for each policy version\n"
    axes.set(xlabel="seconds", ylim=(-height - 1, len(lanes) + 2), title=title)
    axes.set_xlim(0, (ended - began) / timedelta(seconds=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    mpl.use("agg")
    run = areal_flow.open_run(given.run)
    rows = run.trajectories(columns=["trajectory_id", "version_spans", "started_at", "finished_at"])
    rows["version"] = [min(span["version"] for span in spans) for spans in rows.version_spans]
    parts = {"began": ("started_at", "min"), "ended": ("finished_at", "max")}
    groups = rows.groupby(rows.trajectory_id.str[:8]).agg(version=("version", "min"), **parts)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=(1, 1.8))
    draw_learning(left, run.steps(where="step > 0"))
    draw_overlap(right, run.steps(), groups.sort_values("began"))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(given.picture, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
