"""The charts of a run's report, as SVG that takes its colours and fonts from the page around it."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pipelines.report.verdicts import WINDOW_STEPS

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
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_MOST_POINTS = 1000
Interval = tuple[int, float, float, float]
"""A policy version, what was found of it, and the bounds of that."""


def curves(
    lines: Mapping[str, Sequence[float | None]],
    steps: Sequence[int],
    held_out: Sequence[Interval] = (),
) -> str:
    """Return numbers by step: each a thin line, and its mean over eight steps in strength.

    Args:
        lines: what each line is called, and its values, one a step.
        held_out: what evaluations found, drawn at their policy versions.
    """
    every = max(1, len(steps) // _MOST_POINTS)
    with rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 2.5), layout="constrained")
        axes = figure.add_subplot(xlabel="step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
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
            axes.legend(**_LEGEND, ncols=4, columnspacing=1, handlelength=1.2)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
    svg = re.sub(r"^.*?(?=<svg)", "", text.getvalue(), flags=re.DOTALL)
    return svg.replace(INK, "currentColor")


def moving_means(series: pl.Series) -> pl.Series:
    """Return the mean of each value and of up to seven before it; gaps are left out."""
    finite = series.set(~series.is_finite(), None)
    return finite.rolling_mean(WINDOW_STEPS, min_samples=1)
