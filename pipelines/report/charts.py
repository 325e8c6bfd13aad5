"""Draws a report's charts: the six that matter first, then all other metrics that changed.

A chart is SVG that takes its colours and fonts from the page around it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from areal_flow.core.pass_rates import PASS_RATE, EvaluationTable
from areal_flow.core.step_metrics import ENGINE_GAP
from areal_flow.log.ledger import STEPS
from pipelines.report.verdicts import WINDOW_STEPS

Evaluation = tuple[int, EvaluationTable]
"""The oldest policy version that answered, and what its answers were worth."""
Interval = tuple[int, float, float, float]
"""A policy version, what was found of it, and the bounds of that."""
_NUM_FIRST = 6
_SCORES = "Of each step's batch, and of held-out answers."
_LINES: dict[str, tuple[str, dict[str, str]]] = {
    "Pass rate": (_SCORES, {"batch": PASS_RATE}),
    "Mean reward": (_SCORES, {"batch": "reward_mean"}),
    "Entropy": ("Of trained tokens, in nats.", {"entropy": "entropy_mean"}),
    "Staleness": (
        "Of trained tokens: versions between sampling and training.",
        {"mean": "staleness_mean", "max": "staleness_max"},
    ),
    "Length of completions": (
        "Tokens that 90%, 50% and 10% of a step's completions have at most.",
        {f"p{share}": f"rollout/completion_p{share}_tokens" for share in (90, 50, 10)},
    ),
    "Time of a step": ("Seconds.", {"step": "seconds_step"}),
    "Throughput": (
        "Tokens a second that were sampled, and that got a gradient.",
        {"generated": "speed/generated_tokens_per_s", "trained": "speed/trained_tokens_per_s"},
    ),
    "Busy": (
        "The share of the time in which generators and trainer worked.",
        {"generators": "speed/generators_busy_fraction", "trainer": "speed/trainer_busy_fraction"},
    ),
}
"""Charts by their worth: what each means, and columns by what their lines are called."""
_BY_NAME = {
    "pass_rate/difficulty_": ("Pass rate by difficulty", "Of each step's batch."),
    "staleness/trained_tokens_": ("Trained tokens by staleness", "Of each step, in versions."),
    f"{ENGINE_GAP}logprob_difference_": (
        "Engine against trainer",
        "|Difference of log-probabilities| of tokens that the policy before the step sampled.",
    ),
    "reward/": ("Rewards before their weights", "Means over each step's batch."),
}
"""Charts of all metrics whose names begin alike; a line is called by the rest of its name."""


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    meaning: str
    svg: str


def make_charts(
    steps: Sequence[Mapping[str, Any]], evaluations: Iterable[Evaluation]
) -> tuple[list[Chart], list[Chart]]:
    """Return the six charts that matter most of a run that has trained, and all others.

    Numbers that never change are left out, and those that another chart has drawn.

    Args:
        steps: rows of the ledger, from step 1 on.
    """
    held_out: dict[str, list[Interval]] = {"Pass rate": [], "Mean reward": []}
    for at, table in evaluations:
        passed, reward = table.overall.passed, table.overall.reward
        held_out["Pass rate"].append((at, passed.pass_rate, passed.low, passed.high))
        held_out["Mean reward"].append((at, reward.reward_mean, reward.low, reward.high))
    charts, drawn = [], []
    for title, (meaning, named) in {**_LINES, **_other_lines(set(steps[0]))}.items():
        lines = {label: [row.get(name) for row in steps] for label, name in named.items()}
        intervals = held_out.get(title, [])
        shown = [*lines.values()], [value[:2] for value in intervals]
        changes = intervals or any(len(set(values)) > 1 for values in lines.values())
        if shown not in drawn and (changes or (title == "Pass rate" and len(steps) > 1)):
            drawn.append(shown)
            numbers = [row["step"] for row in steps]
            charts.append(Chart(title, meaning, curves(lines, numbers, intervals)))
    first = [chart for chart in charts if chart.title in _LINES][:_NUM_FIRST]
    return first, [chart for chart in charts if chart not in first]


def compare_charts(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Chart]:
    """Return the charts that matter most with a line a run: of several lines, the first one's."""
    steps, charts = range(1, 1 + max(map(len, runs.values()))), []
    for title, (meaning, named) in _LINES.items():
        label, column = next(iter(named.items()))
        lines = {
            run: [row.get(column) for row in rows] + [None] * (len(steps) - len(rows))
            for run, rows in runs.items()
        }
        if any(value is not None for values in lines.values() for value in values):
            charts.append(Chart(f"{title}: {label}", meaning, curves(lines, steps)))
    return charts


def _other_lines(columns: set[str]) -> dict[str, tuple[str, dict[str, str]]]:
    """Return the charts of metrics that no other chart has: some together, the rest alone."""
    metrics = columns.difference(STEPS.names) | {"loss", "grad_norm", "learning_rate"}
    lines_by_title = {}
    for area, (title, meaning) in _BY_NAME.items():
        names = sorted((m for m in metrics if m.startswith(area)), key=lambda m: (len(m), m))
        lines = {name.removeprefix(area).removesuffix("_mean"): name for name in names}
        lines_by_title[title] = meaning, lines
    drawn = {
        name for _, lines in [*_LINES.values(), *lines_by_title.values()] for name in lines.values()
    }
    alone = {name if "/" in name else f"train/{name}": name for name in sorted(metrics - drawn)}
    return {
        **lines_by_title,
        **{title: ("", {title: name}) for title, name in sorted(alone.items())},
    }


INK = "#333333"
"""Becomes `currentColor`: the page's own."""
COLOURS = (
    *("#3b7dd8", "#e0803a", "#4a9d6b", "#9467bd"),
    *("#c44e52", "#8c7a6b", "#d77fb3", "#5bb5c5"),
)
"""No chart has more lines than these."""
_INKED = ("axes.edgecolor", "axes.labelcolor", "grid.color", "text.color", "xtick.color")
_STYLE = {
    **dict.fromkeys((*_INKED, "ytick.color"), INK),
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "legend.frameon": False,
}
_LEGEND: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
_LEGEND_COLUMNS = 4
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_MOST_POINTS = 1000


def curves(
    lines: Mapping[str, Sequence[float | None]],
    steps: Sequence[int],
    held_out: Sequence[Interval] = (),
) -> str:
    """Return `draw_curves` as SVG."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 2.5))
        # Fixed margins: to find those that fit takes longer than to draw the chart.
        legend_rows = -(-(len(lines) + bool(held_out)) // _LEGEND_COLUMNS)
        figure.subplots_adjust(left=0.12, right=0.98, bottom=0.19, top=1 - 0.08 * legend_rows)
        draw_curves(figure.add_subplot(), lines, steps, held_out)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
    svg = re.sub(r"^.*?(?=<svg)", "", text.getvalue(), flags=re.DOTALL)
    return svg.replace(INK, "currentColor")


def draw_curves(
    axes: Any,
    lines: Mapping[str, Sequence[float | None]],
    steps: Sequence[int],
    held_out: Sequence[Interval] = (),
) -> None:
    """Draw numbers by step: each a thin line, and its mean over eight steps in strength.

    Args:
        lines: what each line is called, and its values, one a step.
        held_out: what evaluations found, drawn at their policy versions.
    """
    every = max(1, len(steps) // _MOST_POINTS)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.ticklabel_format(axis="y", scilimits=(-2, 4))  # else a label may need more room
    for (name, values), colour in zip(lines.items(), COLOURS, strict=False):
        thin = pl.Series(values, dtype=pl.Float64)
        strong = moving_means(thin)
        axes.plot(steps[::every], thin[::every], color=colour, alpha=0.4, linewidth=0.8)
        axes.plot(steps[::every], strong[::every], color=colour, linewidth=1.6, label=name)
    if held_out:
        at, means, lows, highs = np.array(held_out, float).T
        dots: dict[str, Any] = {"fmt": "o", "capsize": 3, "color": COLOURS[1]}
        axes.errorbar(at, means, [means - lows, highs - means], label="held-out, 95%", **dots)
    if len(lines) + bool(held_out) > 1:
        axes.legend(**_LEGEND, ncols=_LEGEND_COLUMNS, columnspacing=1, handlelength=1.2)


def draw_timeline(axes: Any, steps: Any, groups: Any) -> None:
    """Draw what generators and trainer do, in seconds: a bar a group or step, by policy version.

    Args:
        steps: rows of `run.steps()`; the first gives only the beginning.
        groups: `version` (the oldest that sampled it), `began` and `ended`, by `began`; of this
            time.
    """
    began, ended = steps.committed_at.iloc[0], steps.committed_at.iloc[-1]
    lanes: list[Any] = []
    for group in groups.itertuples():
        free = (lane for lane, until in enumerate(lanes) if until <= group.began)
        lane = next(free, len(lanes))
        lanes[lane : lane + 1] = [group.ended]
        start, length = (group.began - began).total_seconds(), group.ended - group.began
        bar = (max(start, 0), length.total_seconds() + min(start, 0))
        axes.broken_barh([bar], (2 + lane, 0.7), color=COLOURS[group.version % len(COLOURS)])
    height = max(2, len(lanes) // 3)
    for step in steps.iloc[1:].itertuples():
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
    axes.set_xlim(0, (ended - began).total_seconds())


def moving_means(series: pl.Series) -> pl.Series:
    """Return the mean of each value and of up to seven before it; gaps are left out."""
    finite = series.set(~series.is_finite(), None)
    return finite.rolling_mean(WINDOW_STEPS, min_samples=1)
