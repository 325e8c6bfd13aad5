"""Draws what benchmarks found, from a report's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

GENERATE, TRAIN, WAIT = "#3b75af", "#d98032", "#b9cde2"
COLORS = {"generates": GENERATE, "the slower generator alone": WAIT, "trains": TRAIN}
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def draw_schedules(title: str, rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw a step of each schedule: what generators do, and below it what the trainer does."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 2.9), layout="constrained")
        axis = figure.subplots()
    steps = {}
    for schedule, lane in (("sync", 0), ("async", 2)):
        turns = [row for row in rows if row["schedule"] == schedule]
        names = ("generate_s", "straggling_s", "train_s", "step_s")
        generated, straggling, trained, step = (
            mean(turn[name] for turn in turns) for name in names
        )
        begin = generated + straggling if schedule == "sync" else 0.0
        axis.barh(lane + 1, generated, color=GENERATE)
        axis.barh(lane + 1, straggling, left=generated, color=WAIT)
        axis.barh(lane, trained, left=begin, color=TRAIN)
        axis.plot([step, step], [lane - 0.45, lane + 1.45], color="black")
        axis.text(step, lane + 0.5, f"  {step:.1f} s", va="center")
        steps[schedule] = step
    colors = {**COLORS, "end of the step": "black"}
    patches = [Patch(color=color, label=label) for label, color in colors.items()]
    figure.legend(handles=patches, frameon=False, ncols=4, loc="outside lower center")
    lanes = ["sync, trainer", "sync, generators", "async, trainer", "async, generator"]
    axis.set_yticks(range(4), lanes)
    axis.set_xlabel("seconds of one step, means")
    axis.margins(x=0.12)
    axis.set_xlim(left=0)
    ratio = steps["sync"] / steps["async"]
    axis.set_title(f"{title}: sync takes {ratio:.2f} times as long")
    figure.savefig(path, dpi=100)
