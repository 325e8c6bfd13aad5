"""The page `/rl` in Dask's dashboard. The run's logs are read only while somebody looks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from functools import partial
from time import monotonic, time
from typing import Any

import polars as pl
from bokeh.document import Document
from bokeh.layouts import column, row
from bokeh.models import ColumnDataSource, FactorRange
from bokeh.models.widgets import Div
from bokeh.plotting import figure
from bokeh.server.urls import per_app_patterns
from bokeh.server.views.autoload_js_handler import AutoloadJsHandler
from bokeh.server.views.doc_handler import DocHandler
from bokeh.server.views.metadata_handler import MetadataHandler
from bokeh.server.views.ws import WSHandler
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.dashboard.core import BokehApplication
from distributed.dashboard.scheduler import template_variables
from tornado.ioloop import IOLoop

from areal_flow.cluster import run_numbers
from areal_flow.cluster.pool import WorkerPool
from areal_flow.core.layout import RunLayout
from areal_flow.flow.bottleneck import find_bottleneck
from areal_flow.flow.flow import Flow
from areal_flow.log.dataset import COMMIT_ORDER, read_rows
from areal_flow.log.ledger import STEPS, LedgerTail

PAGE = "rl"
UPDATE_EVERY_S = 2.0
RECENT_STEPS = 8
"""All but the curves is about so many steps."""
MOST_STEPS, MOST_ROWS = 2000, 16_384
"""The newest of the ledger, and of the log, are read."""
BLUE, ORANGE = "#3b7dd8", "#e0803a"
PALE = {BLUE: "#c4d8f3", ORANGE: "#f6d9c4"}
_ORANGE = {run_numbers.TRAINER, "committed", "trained", "discarded"}
_CURVES = {
    "Reward and pass rate": run_numbers.CURVES[:2],
    "Length of completions, in tokens": run_numbers.CURVES[2:3],
    "Staleness, in versions": run_numbers.CURVES[3:],
}
_BARS = {
    "spans": "At work (pale: now); dotted: a new version",
    "stages": "Trajectories on their way, and tokens so far",
    "speeds": "Tokens/s by generator",
}
BOKEHS_HANDLERS = [
    ("/?", DocHandler),
    ("/ws", WSHandler),
    ("/metadata", MetadataHandler),
    ("/autoload.js", AutoloadJsHandler),
]
"""Panel, where a notebook imports it, replaces them by its own, with which pages stay empty."""
_STEP_COLUMNS = [n for n in STEPS.names if n not in ("step", "trajectory_ids", "discarded")]
_TEXT: dict[str, Any] = {"text_font_size": "12px", "text_baseline": "middle", "x_offset": 6}
_WRAPPED: dict[str, Any] = {"sizing_mode": "stretch_width", "styles": {"flex-wrap": "wrap"}}


class RunFeed:
    """What all viewers of one run are shown, as tables by the parts that draw them. `flow` is set
    when training begins."""

    def __init__(self, layout: RunLayout, pool: WorkerPool) -> None:
        self.layout = layout
        self.flow: Flow | None = None
        self._pool = pool
        self._ledger = LedgerTail(layout, _STEP_COLUMNS, since=1, max_rows=MOST_STEPS)
        self._steps = run_numbers.steps_of([])
        self._shown: Mapping[str, pl.DataFrame] = {}
        self._read_at = 0.0
        self._reading = asyncio.Lock()

    async def shown(self) -> Mapping[str, pl.DataFrame]:
        """Return what there is, read in a thread now or a moment ago; {} before the first step."""
        async with self._reading:
            if monotonic() - self._read_at > UPDATE_EVERY_S / 2 and self.layout.steps.exists():
                self._shown = await asyncio.to_thread(self._read, self._at_work())
                self._read_at = monotonic()
        return self._shown

    def _at_work(self) -> dict[str, bool]:
        """Return of the trainer and of each generator whether it has something to do."""
        workers = self._pool.scheduler.workers
        generators = self._pool.registry.present("generator")
        at_work = {
            e.name: bool(getattr(workers.get(e.address), "processing", 0)) for e in generators
        }
        return at_work | {run_numbers.TRAINER: bool(self.flow and self.flow.accounting.in_step)}

    def _read(self, at_work: Mapping[str, bool]) -> dict[str, pl.DataFrame]:
        if rows := self._ledger.read():
            self._steps = self._steps.vstack(run_numbers.steps_of(rows)).tail(MOST_STEPS)
        steps = self._steps.tail(RECENT_STEPS)
        if steps.is_empty():
            return {}
        first, last = steps["trajectory_watermark"][0], steps["trajectory_watermark"][-1]
        where = f"{COMMIT_ORDER} >= {max(first, last - MOST_ROWS)}"
        columns = ["group_id", "generator", "version_spans", *run_numbers.TIMES]
        trajectories = read_rows(self.layout, "trajectories", columns, where)
        groups = run_numbers.groups_of(pl.DataFrame(trajectories))
        began, ended = steps["committed_at"][0], steps["committed_at"][-1]
        now = time() if any(at_work.values()) else ended
        bottleneck = find_bottleneck(steps.to_dicts(), num_generators=max(1, len(at_work) - 1))
        flow = {"stages": run_numbers.flow_stages(self.flow, steps, groups)} if self.flow else {}
        return flow | {
            "verdict": pl.DataFrame([{"step": steps["step"][-1], **bottleneck._asdict()}]),
            "curves": self._steps.select("step", *run_numbers.CURVES),
            "spans": run_numbers.work_spans(steps, groups, at_work=at_work, now=now),
            "swaps": steps.select(at=pl.col("committed_at") - now),
            "speeds": run_numbers.generator_speeds(groups, since=began, now=now),
        }


def add_page(scheduler: Any, feed: RunFeed) -> None:
    """Give a scheduler the page of a run, and put it into the menu of all its pages."""
    variables = template_variables(scheduler)
    variables["pages"].insert(0, PAGE)
    pages = {f"/{PAGE}": partial(_show, feed)}
    replaced, per_app_patterns[:] = per_app_patterns[:], BOKEHS_HANDLERS
    application = BokehApplication(pages, scheduler, template_variables=variables)
    per_app_patterns[:] = replaced
    scheduler.http_application.add_application(application)
    application.initialize(IOLoop.current())
    application.start()


def _show(feed: RunFeed, scheduler: Any, extra: Mapping[str, Any], document: Document) -> None:
    page = Page(feed)
    document.title = f"RL: {feed.layout.name}"
    document.template = env.get_template("simple.html")
    document.template_variables.update(extra)
    document.theme = BOKEH_THEME
    document.add_root(page.root)
    update: Any = page.update  # Bokeh awaits it, which its types do not say
    document.add_next_tick_callback(update)
    document.add_periodic_callback(update, int(UPDATE_EVERY_S * 1000))


class Page:
    """One viewer's figures. Bokeh calls `update` as long as the viewer is there."""

    def __init__(self, feed: RunFeed) -> None:
        self._feed = feed
        self._verdict = Div(text="No training step yet.", sizing_mode="stretch_width")
        self._sources: dict[str, ColumnDataSource] = {}
        self._lanes = {part: FactorRange() for part in _BARS}
        self.root = column(self._verdict, sizing_mode="stretch_width")

    async def update(self) -> None:
        shown = await self._feed.shown()
        for part, table in shown.items():
            self._fill(part, table.to_dict(as_series=False))
        if shown and len(self.root.children) == 1:
            self.root.children = [self._verdict, *self._figures()]

    def _fill(self, part: str, columns: dict[str, Any]) -> None:
        if part == "verdict":
            (step,), (text,), (remedy,) = columns.values()
            advice = f"To train faster, {remedy}." if remedy else ""
            self._verdict.text = f"{self._feed.layout.name}, step {step}. <b>{text}.</b> {advice}"
        if part in _BARS:
            self._lanes[part].factors = [*dict.fromkeys(reversed(columns["lane"]))]
            colours = [ORANGE if lane in _ORANGE else BLUE for lane in columns["lane"]]
            pale = columns.get("pale", [True] * len(colours))
            columns.setdefault("left", [0.0] * len(colours))
            columns["colour"] = [PALE[c] if p else c for c, p in zip(colours, pale, strict=True)]
        self._sources.setdefault(part, ColumnDataSource(columns)).data = columns

    def _figures(self) -> Iterator[Any]:
        yield row(*(self._curves(title) for title in _CURVES), **_WRAPPED)
        timeline = self._bars("spans", x_axis_label="seconds ago")
        timeline.vspan(x="at", source=self._sources["swaps"], color="gray", line_dash="dotted")
        yield timeline
        numbers = self._sources.keys() & {"stages", "speeds"}
        yield row(*(self._bars(part) for part in sorted(numbers, reverse=True)), **_WRAPPED)

    def _curves(self, title: str) -> figure:
        made, source = _figure(title, x_axis_label="step"), self._sources["curves"]
        for name, colour in zip(_CURVES[title], (BLUE, ORANGE), strict=False):
            label = name.rpartition("/")[2].replace("_", " ")
            made.line("step", name, source=source, color=colour, line_width=2, legend_label=label)
        made.legend.visible = len(_CURVES[title]) > 1
        made.legend.location = "bottom_right"
        return made

    def _bars(self, part: str, **options: Any) -> figure:
        source = self._sources[part]
        made = _figure(_BARS[part], y_range=self._lanes[part], **options)
        made.hbar("lane", 0.6, left="left", right="right", color="colour", source=source)
        made.ygrid.visible = False
        if "text" in source.data:
            made.text("left", "lane", source=source, **_TEXT)
            made.xaxis.visible = made.xgrid.visible = False
        return made


def _figure(title: str, **options: Any) -> figure:
    options |= {"sizing_mode": "stretch_width", "min_width": 320, "height": 220, "tools": ""}
    made = figure(title=title, toolbar_location=None, **options)
    made.axis.minor_tick_line_color = made.outline_line_color = None
    return made
