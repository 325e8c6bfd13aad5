"""The curves of several runs in one figure each, which grow by the steps that are new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan, sqrt
from typing import Any

from bokeh.models import ColumnDataSource, HoverTool, TapTool
from bokeh.plotting import figure

from areal_flow.store.dataset import open_dataset, read_rows
from areal_flow.store.queries import Run
from pipelines.report.charts import COLOURS
from pipelines.report.page import held_out_rates

HELD_OUT = "held_out"
FIGURES = {
    "reward": ("Mean reward", "Each step's batch; 95%, prompts counted once."),
    HELD_OUT: ("Held-out pass rate", "Evaluations with their 95% interval."),
    "length": ("Tokens of a completion", "Mean; 10% to 90% of a step's completions."),
    "staleness": ("Staleness", "Mean up to the maximum, in versions."),
    "masked": ("Masked share", "Tokens that were too old, or the environment's."),
}
"""Columns of the curves: what each is called, and what the interval around it means."""
_BANDS = ("reward", "length", "staleness")
_STEPS = ("step", "masked", *(name + end for name in _BANDS for end in ("", "_low", "_high")))
_RATES = ("step", HELD_OUT, f"{HELD_OUT}_low", f"{HELD_OUT}_high")
_TOKENS = ("completion_tokens_mean", "num_trained_tokens", "num_masked_tokens")
_READ = ("step", "reward_mean", "staleness_mean", "staleness_max", "metrics", *_TOKENS)


@dataclass(slots=True)
class RunCurves:
    """What is drawn of one run; `refresh` reads only the steps that are new."""

    run: Run
    colour: str
    steps: ColumnDataSource
    rates: ColumnDataSource
    evaluations: int = 0
    """The version of the dataset that `rates` were read from."""

    @property
    def head(self) -> int:
        return int(max(self.steps.data["step"], default=0))

    def refresh(self) -> bool:
        """Add new steps and evaluations; return whether there were any."""
        layout, evaluations = self.run.layout, 0
        points = read_points(self.run, since=self.head) if layout.steps.exists() else []
        if points:
            self.steps.stream({name: [point[name] for point in points] for name in _STEPS})
        if layout.evaluations.exists():
            evaluations = open_dataset(layout.evaluations).version
        if evaluations == self.evaluations:
            return bool(points)
        self.evaluations, rates = evaluations, held_out_rates(self.run)
        self.rates.data = {name: [rate[at] for rate in rates] for at, name in enumerate(_RATES)}
        return True


def read_points(run: Run, *, since: int = 0) -> list[dict[str, float | None]]:
    """Return what is drawn of each step after `since`.

    Intervals of rewards count each prompt of a batch once: completions of one are alike.
    """
    rows = read_rows(run.layout, "steps", _READ, f"step > {since}").sort_by("step").to_pylist()
    if not rows:
        return []
    controller = run.recipe.controller
    num_prompts = controller.batch_size // controller.group_size
    return [_point({**row, **dict(row["metrics"])}, num_prompts) for row in rows]


def _point(row: dict[str, Any], num_prompts: int) -> dict[str, float | None]:
    reward, staleness = row["reward_mean"], row["staleness_mean"]
    margin = 1.96 * row.get("rollout/reward_std", nan) / sqrt(num_prompts)
    num_tokens = row["num_trained_tokens"] + row["num_masked_tokens"]
    return {
        **{"step": row["step"], "masked": row["num_masked_tokens"] / (num_tokens or nan)},
        **{"reward": reward, "reward_low": reward - margin, "reward_high": reward + margin},
        "length": row["completion_tokens_mean"],
        "length_low": row.get("rollout/completion_p10_tokens"),
        "length_high": row.get("rollout/completion_p90_tokens"),
        **{"staleness": staleness, "staleness_low": staleness},
        "staleness_high": row["staleness_max"],
    }


def curves_of(run: Run, place: int, on_step: Callable[[Run, int], None]) -> RunCurves:
    """Return the curves of a run; `on_step` is called with the step whose point was clicked."""
    sources = [ColumnDataSource({name: [] for name in names}) for names in (_STEPS, _RATES)]

    def clicked(_: str, __: Any, places: list[int], *, source: ColumnDataSource) -> None:
        for at in places[:1]:
            on_step(run, int(source.data["step"][at]))

    for source in sources:
        source.selected.on_change("indices", partial(clicked, source=source))
    return RunCurves(run, COLOURS[place % len(COLOURS)], *sources)


def draw(name: str, curves: Sequence[RunCurves]) -> Any:
    """Return the figure of one of `FIGURES`."""
    quiet = {"toolbar_location": None, "tools": "", "min_border_left": 44}
    drawn, points = figure(height=190, sizing_mode="stretch_width", **quiet), []
    for each in curves:
        source = each.rates if name == HELD_OUT else each.steps
        look = {"x": "step", "y": name, "color": each.colour, "source": source}
        low, high = f"{name}_low", f"{name}_high"
        if name == HELD_OUT:
            drawn.segment("step", low, "step", high, source=source, color=each.colour)
        elif name in _BANDS:
            drawn.varea("step", low, high, source=source, color=each.colour, alpha=0.15)
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
