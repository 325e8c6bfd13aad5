"""The curves of several runs in one figure each, which grow by the steps that are new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

from bokeh.models import ColumnDataSource, HoverTool, TapTool
from bokeh.plotting import figure

from areal_flow.store.groups import read_curves
from areal_flow.store.queries import Run
from pipelines.report.charts import COLOURS
from pipelines.report.page import score_evaluations

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
_ANSWERS = (
    *("evaluation", "policy_version", "verifier", "evaluated_at", "held_out", "prompt_id"),
    *("sample", "difficulty", "reward", "reward_detail", "num_output_tokens"),
)


@dataclass(slots=True)
class RunCurves:
    """What is drawn of one run; `refresh` reads only the steps that are new."""

    run: Run
    colour: str
    steps: ColumnDataSource
    rates: ColumnDataSource
    num_answers: int = 0

    @property
    def head(self) -> int:
        return int(max(self.steps.data["step"], default=0))

    def refresh(self) -> bool:
        """Add new steps and evaluations; return whether there were any."""
        layout, num_answers = self.run.layout, 0
        found = read_curves(self.run, since=self.head) if layout.steps.exists() else {"step": []}
        if found["step"]:
            self.steps.stream(found)
        if layout.evaluations.exists():
            num_answers = len(self.run.evaluations("arrow", columns=["sample"]))
        if num_answers == self.num_answers:
            return bool(found["step"])
        self.num_answers = num_answers
        made = score_evaluations(self.run.evaluations("arrow", columns=_ANSWERS), self.run)
        rates = [(at, table.overall.passed) for at, table in sorted(made, key=itemgetter(0))]
        rows = [(at, rate.pass_rate, rate.low, rate.high) for at, rate in rates]
        columns = map(list, zip(*rows, strict=True))
        self.rates.data = dict(zip(_RATES, columns, strict=True))
        return True


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
