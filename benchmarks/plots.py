"""Plots the results of benchmarks from a report's rows."""

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
    """Draw a step of each schedule: generators above, trainer below."""
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


LINES = (GENERATE, TRAIN, "#4a9d6b", "#9467bd", "#8c7a6b", "#c44e52", "#5bb5c5")
Points = Mapping[str, tuple[float, float]]
"""By the label of a place on the x axis, a mean and half the width of its interval."""


def draw_estimates(lines: Mapping[str, Points], path: Path, *, x: str, y: str) -> None:
    """Draw one line per name, with intervals; x values are evenly spaced."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6, 3.2), layout="constrained")
        axis = figure.subplots()
    labels = list(next(iter(lines.values())))
    for number, (name, points) in enumerate(lines.items()):
        places = [labels.index(label) + 0.06 * (number - len(lines) / 2) for label in points]
        means, halves = zip(*points.values(), strict=True)
        color = LINES[number % len(LINES)]
        axis.errorbar(places, means, halves, color=color, label=name, marker="o", capsize=3)
    axis.set_xticks(range(len(labels)), labels)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    if len(lines) > 1:
        figure.legend(frameon=False, ncols=3, loc="outside upper center")
    figure.savefig(path, dpi=80)


def draw_bars(bars: Points, path: Path, *, x: str, none: float) -> None:
    """Draw one bar per name from the value of no effect, with its interval, the first on top."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6, 0.9 + 0.36 * len(bars)), layout="constrained")
        axis = figure.subplots()
    means, halves = zip(*bars.values(), strict=True)
    widths = [mean - none for mean in means]
    axis.barh(range(len(bars)), widths, left=none, xerr=halves, color=GENERATE, capsize=3)
    axis.axvline(none, color="black", linewidth=0.8)
    axis.set_yticks(range(len(bars)), list(bars))
    axis.invert_yaxis()
    axis.set_xlabel(x)
    figure.savefig(path, dpi=80)
