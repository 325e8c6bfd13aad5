"""The curves of several runs in one figure each, which grow by the steps that are new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import nan, sqrt
from typing import Any

from bokeh.models import ColumnDataSource, HoverTool, TapTool
from bokeh.plotting import figure

from areal_flow.log.dataset import open_dataset, read_rows
from areal_flow.log.queries import Run
from pipelines.report.charts import COLOURS
from pipelines.report.page import held_out_rates

HELD_OUT = "held_out"
FIGURES = {
    "reward_mean": ("Mean reward", "Each step's batch; 95%, prompts counted once."),
    HELD_OUT: ("Held-out pass rate", "Evaluations with their 95% interval."),
    "completion_tokens_mean": (
        "Tokens of a completion",
        "Mean; 10% to 90% of a step's completions.",
    ),
    "staleness_mean": ("Staleness", "Mean up to the maximum, in versions."),
    "masked": ("Masked share", "Tokens that were too old, or the environment's."),
}
"""Columns of the curves: what each is called, and what the interval around it means."""
_BANDS = {
    "reward_mean": ("reward_low", "reward_high"),
    "completion_tokens_mean": [f"rollout/completion_p{share}_tokens" for share in (10, 90)],
    "staleness_mean": ("staleness_mean", "staleness_max"),
}
_STEPS = {"step", "masked", *_BANDS, *(name for band in _BANDS.values() for name in band)}
_RATES = ("step", HELD_OUT, "low", "high")
_TOKENS = ("completion_tokens_mean", "num_trained_tokens", "num_masked_tokens")
_READ = ("step", "reward_mean", "staleness_mean", "staleness_max", "metrics", *_TOKENS)


class RunCurves:
    """What is drawn of one run; `refresh` reads only the steps that are new."""

    def __init__(self, run: Run, place: int, on_step: Callable[[Run, int], None]) -> None:
        """Have `on_step` called with the step whose point was clicked."""
        self.run, self.colour = run, COLOURS[place % len(COLOURS)]
        self.steps, self.rates = (
            ColumnDataSource({name: [] for name in names}) for names in (_STEPS, _RATES)
        )
        self._evaluations = 0  # the version of the dataset that was read

        def clicked(_: str, __: Any, places: list[int], *, source: ColumnDataSource) -> None:
            for at in places[:1]:
                on_step(run, int(source.data["step"][at]))

        for source in (self.steps, self.rates):
            source.selected.on_change("indices", partial(clicked, source=source))

    @property
    def head(self) -> int:
        return int(max(self.steps.data["step"], default=0))

    def refresh(self) -> bool:
        """Add new steps and evaluations; return whether there were any."""
        layout, evaluations = self.run.layout, 0
        rows = read_points(self.run, since=self.head) if layout.steps.exists() else []
        if rows:
            self.steps.stream({name: [row.get(name) for row in rows] for name in _STEPS})
        if layout.evaluations.exists():
            evaluations = open_dataset(layout.evaluations).version
        if evaluations == self._evaluations:
            return bool(rows)
        rates = held_out_rates(self.run)
        self.rates.data = {name: [rate[at] for rate in rates] for at, name in enumerate(_RATES)}
        self._evaluations = evaluations
        return True


def read_points(run: Run, *, since: int = 0) -> list[dict[str, Any]]:
    """Return numbers of each step after `since`.

    Intervals of rewards count each prompt of a batch once: completions of one are alike.
    """
    table = read_rows(run.layout, "steps", _READ, f"step > {since}").sort_by("step")
    rows: list[dict[str, Any]] = table.to_pylist()
    z = 1.96 / sqrt(run.recipe.groups_per_step) if rows else 0.0
    for row in rows:
        row |= dict(row["metrics"])
        mean, margin = row["reward_mean"], z * row.get("rollout/reward_std", nan)
        num_tokens = row["num_trained_tokens"] + row["num_masked_tokens"]
        row |= {"reward_low": mean - margin, "reward_high": mean + margin}
        row["masked"] = row["num_masked_tokens"] / (num_tokens or nan)
    return rows


def draw(name: str, curves: Sequence[RunCurves]) -> Any:
    """Return the figure of one of `FIGURES`."""
    quiet = {"toolbar_location": None, "tools": "", "min_border_left": 44}
    drawn, points = figure(height=190, sizing_mode="stretch_width", **quiet), []
    for each in curves:
        source = each.rates if name == HELD_OUT else each.steps
        look = {"x": "step", "y": name, "color": each.colour, "source": source}
        if name == HELD_OUT:
            drawn.segment("step", "low", "step", "high", source=source, color=each.colour)
        elif name in _BANDS:
            drawn.varea("step", *_BANDS[name], source=source, color=each.colour, alpha=0.15)
        drawn.line(line_width=1.6, **look)
        size = 7 if name == HELD_OUT else 4
        point = drawn.scatter(size=size, name=each.run.layout.name, nonselection_alpha=0.7, **look)
        point.selection_glyph = point.glyph.clone(size=11, line_color="black")
        points.append(point)
    tips = [("", "$name"), ("step", "@step"), (FIGURES[name][0], f"@{name}{{0.000}}")]
    drawn.add_tools(TapTool(renderers=points), HoverTool(renderers=points, tooltips=tips))
    drawn.outline_line_color = drawn.axis.minor_tick_line_color = None
    drawn.axis.axis_line_color = drawn.axis.major_tick_line_color = "#999999"
    drawn.grid.grid_line_alpha, drawn.y_range.default_span = 0.4, 0.2
    return drawn
