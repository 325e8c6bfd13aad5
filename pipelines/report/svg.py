"""The charts of a run's report, as SVG that takes its colours and fonts from the page around it."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK = "#333333"
"""Becomes `currentColor`: the page's own."""
COLOURS = (
    *("#3b7dd8", "#e0803a", "#4a9d6b", "#9467bd"),
    *("#c44e52", "#8c7a6b", "#d77fb3", "#5bb5c5"),
)
"""No chart has more lines than these."""
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": f"cycler('color', {list(COLOURS)})",
    "grid.color": INK,
    "grid.alpha": 0.15,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}
Interval = tuple[int, float, float, float]
"""A policy version, what was found of it, and the bounds of that."""

_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_WINDOW_STEPS = 8
_MOST_POINTS = 1000


def curves(
    lines: Mapping[str, Sequence[float | None]],
    *,
    steps: Sequence[int],
    label: str,
    held_out: Sequence[Interval] = (),
) -> str:
    """Return numbers by step: each a thin line, and its mean over eight steps in strength.

    Args:
        lines: what each line is called, and its values, one a step.
        held_out: what evaluations found, drawn at their policy versions.
    """

    def draw(axes: Axes) -> None:
        for (name, values), colour in zip(lines.items(), COLOURS, strict=False):
            series = np.array([np.nan if value is None else value for value in values], float)
            means = _moving_means(series)
            every = max(1, len(series) // _MOST_POINTS)
            axes.plot(steps[::every], series[::every], color=colour, alpha=0.3, linewidth=0.8)
            axes.plot(steps[::every], means[::every], color=colour, label=name)
        if held_out:
            _draw_intervals(axes, held_out)
        if len(lines) + bool(held_out) > 1:
            axes.legend()

    return _svg(draw, xlabel="step", ylabel=label)


def histogram(
    bars: Mapping[str, Mapping[int, int]], *, xlabel: str, ylabel: str, limit: int | None = None
) -> str:
    """Return shares by a whole number, the bars of each name beside the others'.

    Args:
        bars: how much there is of each number.
        limit: a line is drawn after this number.
    """
    numbers = [number for counts in bars.values() for number in counts]
    width = max(1, -(-(max(numbers, default=0) - min(numbers, default=0) + 1) // 60))

    def draw(axes: Axes) -> None:
        for place, (name, counts) in enumerate(bars.items()):
            binned: Counter[int] = Counter()
            for number, count in counts.items():
                binned[number // width] += count
            axes.bar(
                [(number + (place + 0.5) / len(bars) - 0.5) * width for number in binned],
                [count / max(1, binned.total()) for count in binned.values()],
                width=0.9 * width / len(bars),
                label=name,
            )
        if limit is not None:
            axes.axvline(limit + 0.5, color=INK, linestyle="--", linewidth=1)
        if len(bars) > 1:
            axes.legend()

    return _svg(draw, xlabel=xlabel, ylabel=ylabel)


def _draw_intervals(axes: Axes, held_out: Sequence[Interval]) -> None:
    versions, values, lows, highs = np.array(held_out, float).T
    axes.errorbar(
        versions,
        values,
        yerr=[values - lows, highs - values],
        fmt="o",
        capsize=3,
        color=COLOURS[1],
        label="held-out, 95%",
    )


def _moving_means(series: Any) -> Any:
    """Return the mean of each value and of up to seven before it; gaps are left out."""
    known = np.isfinite(series)

    def window_sums(values: Any) -> Any:
        sums = np.cumsum(np.concatenate([np.zeros(_WINDOW_STEPS), values]))
        return sums[_WINDOW_STEPS:] - sums[:-_WINDOW_STEPS]

    with np.errstate(invalid="ignore"):
        return window_sums(np.where(known, series, 0.0)) / window_sums(known)


def _svg(draw: Callable[[Axes], None], *, xlabel: str, ylabel: str) -> str:
    text = io.StringIO()
    with rc_context(_STYLE):
        figure = Figure(figsize=(6.2, 2.7), layout="constrained")
        axes = figure.add_subplot()
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        draw(axes)
        figure.savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
    svg = re.sub(r"^.*?(?=<svg)", "", text.getvalue(), flags=re.DOTALL)
    return svg.replace(INK, "currentColor")
