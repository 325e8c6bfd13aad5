"""Draws the page `/rl` with Bokeh, in Dask's own frame, and links it from Dask's menu."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from html import escape
from typing import Any

import polars as pl
from bokeh.document import Document
from bokeh.layouts import column, row
from bokeh.models import ColumnDataSource, FactorRange
from bokeh.models.widgets import Div
from bokeh.plotting import figure
from distributed.dashboard import scheduler as dask_pages
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from areal_flow.cluster.dashboard.run_feed import RunFeed
from areal_flow.cluster.dashboard.run_numbers import TRAINER
from areal_flow.errors import ArealFlowError

PAGE = "rl"
UPDATE_EVERY_MS = 2000
BLUE, ORANGE, GREY = "#3b7dd8", "#e0803a", "#8c8c8c"
PALE = {BLUE: "#c4d8f3", ORANGE: "#f6d9c4"}
_CURVES = {
    "Reward and pass rate": {"reward": BLUE, "pass rate": ORANGE},
    "Length of completions, in tokens": {"length": BLUE},
    "Staleness, in versions": {"mean": BLUE, "max": GREY},
}
_ORANGE = {TRAINER, "committed", "trained", "discarded"}
_TEXT: dict[str, Any] = {"text_font_size": "12px", "text_baseline": "middle", "x_offset": 6}
_WRAPPED: dict[str, Any] = {"sizing_mode": "stretch_width", "styles": {"flex-wrap": "wrap"}}


@contextmanager
def page_added(feed: RunFeed) -> Iterator[None]:
    """Give the scheduler that is made meanwhile the page of a run."""
    dask_pages.applications[f"/{PAGE}"] = partial(_show, feed)
    try:
        yield
    finally:
        del dask_pages.applications[f"/{PAGE}"]


def link_page(scheduler: Any) -> None:
    """Put the page into the menu of all pages of a scheduler that has it."""
    dask_pages.template_variables(scheduler)["pages"].insert(0, PAGE)


def _show(feed: RunFeed, scheduler: Any, extra: Mapping[str, Any], document: Document) -> None:
    page = Page(feed)
    document.title = f"RL: {feed.layout.name}"
    document.template = env.get_template("simple.html")
    document.template_variables.update(extra)
    document.theme = BOKEH_THEME
    document.add_root(page.root)
    update: Any = page.update  # Bokeh awaits it, and does not say so
    document.add_next_tick_callback(update)
    document.add_periodic_callback(update, UPDATE_EVERY_MS)


class Page:
    """One viewer's figures. Bokeh calls `update` as long as the viewer is there."""

    def __init__(self, feed: RunFeed) -> None:
        self._feed = feed
        self._verdict = Div(text="No training step yet.", sizing_mode="stretch_width")
        self._sources: dict[str, ColumnDataSource] = {}
        self._lanes = {name: FactorRange() for name in ("spans", "speeds", "stages")}
        self.root = column(self._verdict, sizing_mode="stretch_width")

    async def update(self) -> None:
        try:
            shown = await self._feed.shown()
        except ArealFlowError as error:
            self._verdict.text = escape(str(error))
            return
        if not shown:
            return
        for part, table in shown.items():
            self._fill(part, table)
        if len(self.root.children) == 1:
            self.root.children = [self._verdict, *self._figures()]

    def _fill(self, part: str, table: pl.DataFrame) -> None:
        columns: dict[str, Any] = table.to_dict(as_series=False)
        if part == "verdict":
            (step,), (text,), (remedy,) = columns.values()
            heading = f"{escape(self._feed.layout.name)}, step {step}"
            self._verdict.text = f"<p>{heading}</p><p><b>{text}</b> {remedy}</p>"
        if part in self._lanes:
            self._lanes[part].factors = [*dict.fromkeys(reversed(columns["lane"]))]
            colours = [ORANGE if lane in _ORANGE else BLUE for lane in columns["lane"]]
            pale = columns.get("pale", [True] * len(colours))
            columns["colour"] = [PALE[c] if p else c for c, p in zip(colours, pale, strict=True)]
        if part in self._sources:
            self._sources[part].data = columns
        else:
            self._sources[part] = ColumnDataSource(columns)

    def _figures(self) -> Iterator[Any]:
        curves = [self._curves(title, lines) for title, lines in _CURVES.items()]
        yield row(*curves, **_WRAPPED)
        timeline = self._bars("spans", "At work (pale: not in the log yet); dotted: new weights")
        timeline.vspan(x="at", source=self._sources["swaps"], color=GREY, line_dash="dotted")
        timeline.xaxis.axis_label = "seconds ago"
        yield timeline
        titles = {"stages": "Trajectories on their way", "speeds": "Tokens/s by generator"}
        yield row(*(self._bars(p, t) for p, t in titles.items() if p in self._sources), **_WRAPPED)

    def _curves(self, title: str, lines: Mapping[str, str]) -> figure:
        made = _figure(title, x_axis_label="step")
        for name, colour in lines.items():
            source = self._sources["curves"]
            made.line("step", name, source=source, color=colour, line_width=2, legend_label=name)
        made.legend.visible = len(lines) > 1
        made.legend.location = "bottom_right"
        return made

    def _bars(self, part: str, title: str) -> figure:
        source, is_timeline = self._sources[part], part == "spans"
        made = _figure(title, y_range=self._lanes[part])
        left = "left" if is_timeline else 0
        made.hbar("lane", left=left, right="right", height=0.6, color="colour", source=source)
        if not is_timeline:
            made.text(0, "lane", "text", source=source, **_TEXT)
            made.xaxis.visible = made.xgrid.visible = False
        made.ygrid.visible = False
        return made


def _figure(title: str, **options: Any) -> figure:
    size = {"sizing_mode": "stretch_width", "min_width": 320, "height": 220}
    made = figure(title=title, toolbar_location=None, tools="", **size, **options)
    made.outline_line_color = None
    return made
