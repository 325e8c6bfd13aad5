"""What the pages about a run draw, and charts as SVG or on the axes of a notebook.

SVG takes its colours and fonts from the page around it.
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
from areal_flow.core.types import ENGINE_GAP
from areal_flow.log.ledger import STEPS

Evaluation = tuple[int, EvaluationTable]
"""The oldest policy version that answered, and the scores of its answers."""
Interval = tuple[int, float, float, float]
"""A policy version, an estimate, and its lower and upper bound."""
WINDOW_STEPS = 8
"""Means are over this many steps, since the value of a single step is mostly noise."""
_NUM_FIRST = 6


@dataclass(frozen=True, slots=True)
class Metrics:
    """Columns of the ledger that share a chart."""

    meaning: str
    columns: Mapping[str, str]
    """By the label of their line."""
    band: tuple[str, str] | None = None
    """Columns around the first one, drawn as an area on the live page."""


_LENGTHS = {f"p{share}": f"rollout/completion_p{share}_tokens" for share in (50, 90, 10)}
CHARTS = {
    "Pass rate": Metrics(
        "Each step's batch; points are held-out answers with 95% intervals.", {"batch": PASS_RATE}
    ),
    "Mean reward": Metrics(
        "Each step's batch; intervals are 95%, each prompt counted once.",
        {"batch": "reward_mean"},
        band=("reward_low", "reward_high"),
    ),
    "Entropy": Metrics("Trained tokens, in nats.", {"entropy": "entropy_mean"}),
    "Staleness": Metrics(
        "Trained tokens: versions between sampling and training, mean and maximum.",
        {"mean": "staleness_mean", "max": "staleness_max"},
        band=("staleness_mean", "staleness_max"),
    ),
    "Completion length": Metrics(
        "Tokens: median, 10th and 90th percentile of a step's completions.",
        _LENGTHS,
        band=(_LENGTHS["p10"], _LENGTHS["p90"]),
    ),
    "Step time": Metrics("Seconds.", {"step": "step_s"}),
    "Throughput": Metrics(
        "Tokens per second, sampled and trained.",
        {"generated": "speed/generated_tokens_per_s", "trained": "speed/trained_tokens_per_s"},
    ),
    "Busy": Metrics(
        "Fraction of the time in which generators and trainer worked.",
        {"generators": "speed/generators_busy_fraction", "trainer": "speed/trainer_busy_fraction"},
    ),
    "Masked": Metrics(
        "Fraction of tokens that were too old, or the environment's.",
        {"masked": "masked_fraction"},
    ),
}
"""Charts of the report and of the live page by title, the most important first."""
_BY_PREFIX = {
    "pass_rate/difficulty_": ("Pass rate by difficulty", "Each step's batch."),
    "staleness/trained_tokens_": ("Trained tokens by staleness", "Each step, in versions."),
    f"{ENGINE_GAP}logprob_difference_": (
        "Engine against trainer",
        "|Difference of log-probabilities| of tokens that the policy before the step sampled.",
    ),
    "reward/": ("Rewards before their weights", "Means over each step's batch."),
}
"""Charts of all metrics with a common prefix; the label of a line is the rest of its name."""


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    meaning: str
    svg: str


def make_charts(
    steps: Sequence[Mapping[str, Any]], evaluations: Iterable[Evaluation]
) -> tuple[list[Chart], list[Chart]]:
    """Return the six most important charts of a run that has trained, and all others.

    Metrics that never change are left out, and those that an earlier chart shows.

    Args:
        steps: rows of the ledger, from step 1 on.
    """
    held_out: dict[str, list[Interval]] = {"Pass rate": [], "Mean reward": []}
    for version, table in evaluations:
        passed, reward = table.overall.passed, table.overall.reward
        held_out["Pass rate"].append((version, passed.pass_rate, passed.low, passed.high))
        held_out["Mean reward"].append((version, reward.reward_mean, reward.low, reward.high))
    charts, drawn = [], []
    numbers = [row["step"] for row in steps]
    for title, metrics in {**CHARTS, **_other_charts(set(steps[0]))}.items():
        lines = {label: [row.get(name) for row in steps] for label, name in metrics.columns.items()}
        intervals = held_out.get(title, [])
        content = [*lines.values()], [interval[:2] for interval in intervals]
        changes = intervals or any(len(set(values)) > 1 for values in lines.values())
        if content not in drawn and (changes or (title == "Pass rate" and len(steps) > 1)):
            drawn.append(content)
            charts.append(Chart(title, metrics.meaning, curves(lines, numbers, intervals)))
    first = [chart for chart in charts if chart.title in CHARTS][:_NUM_FIRST]
    return first, [chart for chart in charts if chart not in first]


def compare_charts(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Chart]:
    """Return the most important charts with one line per run: each chart's first column."""
    steps, charts = range(1, 1 + max(map(len, runs.values()))), []
    for title, metrics in CHARTS.items():
        label, column = next(iter(metrics.columns.items()))
        lines = {
            run: [row.get(column) for row in rows] + [None] * (len(steps) - len(rows))
            for run, rows in runs.items()
        }
        if any(value is not None for values in lines.values() for value in values):
            charts.append(Chart(f"{title}: {label}", metrics.meaning, curves(lines, steps)))
    return charts


def _other_charts(columns: set[str]) -> dict[str, Metrics]:
    """Return charts of the metrics that `CHARTS` lacks: one per prefix, the rest one each."""
    names = columns.difference(STEPS.names) | {"loss", "grad_norm", "learning_rate"}
    charts = {}
    for prefix, (title, meaning) in _BY_PREFIX.items():
        group = sorted((n for n in names if n.startswith(prefix)), key=lambda n: (len(n), n))
        labels = {name.removeprefix(prefix).removesuffix("_mean"): name for name in group}
        charts[title] = Metrics(meaning, labels)
    for metrics in (*CHARTS.values(), *charts.values()):
        names.difference_update(metrics.columns.values())
    titles = {name if "/" in name else f"train/{name}": name for name in names}
    return charts | {title: Metrics("", {title: titles[title]}) for title in sorted(titles)}


INK = "#333333"
"""Becomes `currentColor`: the page's text colour."""
COLOURS = (
    *("#3b7dd8", "#e0803a", "#4a9d6b", "#9467bd"),
    *("#c44e52", "#8c7a6b", "#d77fb3", "#5bb5c5"),
)
"""One per line; no chart has more lines."""
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
_MAX_POINTS = 1000


def curves(
    lines: Mapping[str, Sequence[float | None]],
    steps: Sequence[int],
    held_out: Sequence[Interval] = (),
) -> str:
    """Return `draw_curves` as SVG."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 2.5))
        # Fixed margins: computing those that fit takes longer than drawing the chart.
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
    """Draw values by step: a thin line, and a strong one for the mean over eight steps.

    Args:
        lines: values by label, one per step.
        held_out: results of evaluations, drawn at their policy versions.
    """
    every = max(1, len(steps) // _MAX_POINTS)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.ticklabel_format(axis="y", scilimits=(-2, 4))  # else a label may need more room
    for (name, values), colour in zip(lines.items(), COLOURS, strict=False):
        thin = pl.Series(values, dtype=pl.Float64)
        strong = moving_means(thin)
        axes.plot(steps[::every], thin[::every], color=colour, alpha=0.4, linewidth=0.8)
        axes.plot(steps[::every], strong[::every], color=colour, linewidth=1.6, label=name)
    if held_out:
        versions, means, lows, highs = np.array(held_out, float).T
        dots: dict[str, Any] = {"fmt": "o", "capsize": 3, "color": COLOURS[1]}
        axes.errorbar(versions, means, [means - lows, highs - means], label="held-out, 95%", **dots)
    if len(lines) + bool(held_out) > 1:
        axes.legend(**_LEGEND, ncols=_LEGEND_COLUMNS, columnspacing=1, handlelength=1.2)


def draw_timeline(axes: Any, steps: Any, groups: Any) -> None:
    """Draw one bar per group and per step over time in seconds, coloured by policy version.

    Args:
        steps: rows of `run.steps()`; the first gives only the beginning.
        groups: `version` (the oldest that sampled it), `began` and `ended`, sorted by `began`.
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
        start = end - step.train_s - step.stage_s
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
    """Return means over each value and up to seven before it, ignoring gaps."""
    finite = series.set(~series.is_finite(), None)
    return finite.rolling_mean(WINDOW_STEPS, min_samples=1)
