"""Draws what benchmarks found: one function a figure, from the report that `--json` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

GENERATE, TRAIN, WAIT = "#3b75af", "#d98032", "#b9cde2"
PUBLISHED_SPEEDUP = 2.77
"""Of arXiv 2505.24298, a policy of 1.5B parameters."""


def draw_schedules(report: Mapping[str, Any], path: Path) -> None:
    """Draw a step of each schedule: what generators do, and below it what the trainer does."""
    figure, axes = _figure(1, height=2.9)
    (axis,) = axes
    lanes = ["sync, trainer", "sync, generators", "async, trainer", "async, generator"]
    for schedule, train_lane in (("sync", 0), ("async", 2)):
        of_schedule = [m for m in report["measurements"] if m["schedule"] == schedule]
        parts = {
            name: mean(m[name] for m in of_schedule)
            for name in ("seconds_generate", "seconds_straggling", "seconds_train", "seconds_step")
        }
        generated, straggling, trained, step = parts.values()
        begin = generated + straggling if schedule == "sync" else 0.0
        axis.barh(train_lane + 1, generated, color=GENERATE)
        axis.barh(train_lane + 1, straggling, left=generated, color=WAIT)
        axis.barh(train_lane, trained, left=begin, color=TRAIN)
        axis.plot([step, step], [train_lane - 0.45, train_lane + 1.45], color="black")
        axis.text(step, train_lane + 0.5, f"  {step:.1f} s", va="center")
    legend = {
        "generates": GENERATE,
        "the slower generator alone": WAIT,
        "trains": TRAIN,
        "end of the step": "black",
    }
    figure.legend(
        handles=[Patch(color=color, label=label) for label, color in legend.items()],
        frameon=False,
        ncols=4,
        loc="outside lower center",
    )
    axis.set_yticks(range(4), lanes)
    axis.set_xlabel("seconds of one step, means")
    axis.margins(x=0.12)
    axis.set_xlim(left=0)
    axis.set_title(f"{report['title']}: sync takes {report['speedup']:.2f} times as long")
    _save(figure, path)


def draw_scaling(report: Mapping[str, Any], path: Path) -> None:
    """Draw time per step by generators with the bounds, and how much quicker async is."""
    figure, (seconds, ratio) = _figure(2)
    sizes = report["sizes"]
    numbers = [size["async"]["num_generators"] for size in sizes]
    for schedule, color in (("sync", TRAIN), ("async", GENERATE)):
        values = [size[schedule] for size in sizes]
        steps = [value["seconds_step"] for value in values]
        seconds.plot(numbers, steps, "o-", color=color, label=schedule)
        bounds = [value["bound_s"] for value in values]
        seconds.plot(numbers, bounds, ":", color=color, label=f"{schedule}, bound")
    seconds.set_yscale("log")
    seconds.set_ylabel("seconds a step (virtual)")
    seconds.legend(frameon=False)
    by_points = {"textcoords": "offset points", "ha": "right"}
    speedups = [size["speedup"] for size in sizes]
    ratio.plot(numbers, speedups, "o-", color="black")
    for number, speedup in zip(numbers, speedups, strict=True):
        ratio.annotate(f"{speedup:.2f}", (number, speedup), (-6, 6), **by_points)
    ratio.axhline(PUBLISHED_SPEEDUP, color="gray", linestyle="--")
    ratio.text(numbers[0], PUBLISHED_SPEEDUP, "published: 2.77", va="bottom", color="gray")
    ratio.set_ylabel("trained tokens/s, async over sync")
    ratio.margins(0.15)
    ratio.set_ylim(bottom=0)
    for axis in (seconds, ratio):
        axis.set_xscale("log", base=2)
        axis.set_xticks(numbers, [str(number) for number in numbers])
        axis.set_xlabel("generators of async")
    _save(figure, path)


def draw_interruption(report: Mapping[str, Any], path: Path) -> None:
    """Draw tokens a second and staleness by the rule that new weights follow."""
    figure, (speed, staleness) = _figure(2)
    rules = report["rules"]
    names = list(rules)
    rates = [rules[name]["tokens_per_second"] for name in names]
    _bars(speed, names, rates, [f"{r:,.0f}" for r in rates], GENERATE)
    speed.set_ylabel("tokens/s")
    ages = [rules[name]["staleness"] for name in names]
    _bars(staleness, names, ages, [f"{age:.2f}" for age in ages], TRAIN)
    staleness.set_ylabel("mean staleness of a token, versions")
    _save(figure, path)


def draw_staleness(report: Mapping[str, Any], path: Path) -> None:
    """Draw the held-out pass rate by staleness, early and at the end: each seed, and the means."""
    figure, panels = _figure(2)
    etas = list(report["etas"])
    for axis, which in zip(panels, (min, max), strict=True):
        for name, color in (("decoupled", GENERATE), ("ppo", TRAIN)):
            means = []
            for place, eta in enumerate(etas):
                runs = report["etas"][eta][name].values()
                step = which(int(step) for run in runs for step in run["pass_rates"])
                found = [run["pass_rates"][f"{step}"] for run in runs]
                axis.plot([place] * len(found), found, ".", color=color, alpha=0.5)
                means.append(mean(found))
            axis.plot(range(len(etas)), means, "-", color=color, label=name)
        axis.set_xticks(range(len(etas)), etas)
        axis.set_xlabel("eta")
        axis.set_ylabel(f"held-out pass rate after {step} steps")
        axis.legend(frameon=False)
    _save(figure, path)


def _bars(
    axis: Axes, names: Sequence[str], values: Sequence[float], labels: Sequence[str], color: str
) -> None:
    axis.bar_label(axis.bar(names, values, width=0.6, color=color), labels)
    axis.margins(y=0.12)


def _figure(num_panels: int, *, height: float = 3.0) -> tuple[Figure, Sequence[Axes]]:
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(style):
        figure = Figure(figsize=(8, height), layout="constrained")
        return figure, tuple(figure.subplots(1, num_panels, squeeze=False)[0])


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
