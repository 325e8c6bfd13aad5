"""The README's picture of a finished run: its pass rate, and generation beside training.

A group has the colour of the oldest version that sampled it; a step, of that which it starts from.

    python -m benchmarks.readme_picture runs/NAME docs/images/run.png
"""

from __future__ import annotations

import argparse
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    mpl.use("agg")
    run = areal_flow.open_run(given.run)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=(1, 1.8))
    draw_learning(left, run.steps(where="step > 0"))
    run.plot.timeline(right, num_steps=NUM_STEPS)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(given.picture, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
