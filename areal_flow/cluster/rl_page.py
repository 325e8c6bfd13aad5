"""The page `/rl` in Dask's dashboard. The run's logs are read only while somebody looks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
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

from areal_flow.cluster.control import PoolSnapshot
from areal_flow.cluster.pool import WorkerPool
from areal_flow.core.layout import RunLayout
from areal_flow.core.pass_rates import PASS_RATE
from areal_flow.flow import diagnosis
from areal_flow.flow.flow import Flow
from areal_flow.log.dataset import COMMIT_ORDER, read_rows
from areal_flow.log.ledger import STEPS, LedgerTail

TRAINER = "trainer"
CURVES = ("reward_mean", PASS_RATE, "completion_tokens_mean", "staleness_mean", "staleness_max")
TIMES = ("submitted_at", "started_at", "finished_at", "scored_at")
_NUMBERS = ("committed_at", *CURVES, *diagnosis.COLUMNS)
_STEP = {"step": pl.Int64, "trajectory_watermark": pl.Int64, **dict.fromkeys(_NUMBERS, pl.Float64)}

PAGE = "rl"
UPDATE_EVERY_S = 2.0
RECENT_STEPS = 8
"""All but the curves is about so many steps."""
MOST_STEPS, MOST_ROWS = 2000, 16_384
"""The newest of the ledger, and of the log, are read."""
BLUE, ORANGE = "#3b7dd8", "#e0803a"
PALE = {BLUE: "#c4d8f3", ORANGE: "#f6d9c4"}
_ORANGE = {TRAINER, "committed", "trained", "discarded"}
_CURVES = {
    "Reward and pass rate": CURVES[:2],
    "Length of completions, in tokens": CURVES[2:3],
    "Staleness, in versions": CURVES[3:],
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
        self._ledger = LedgerTail(layout, _STEP_COLUMNS, since=1, newest=MOST_STEPS)
        self._steps = steps_of([])
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
        workers = PoolSnapshot.of(self._pool).workers
        at_work = {
            worker.name: worker.num_assigned > 0
            for worker in workers
            if worker.role == "generator" and worker.address and worker.state != "leaving"
        }
        return at_work | {TRAINER: bool(self.flow and self.flow.accounting.in_step)}

    def _read(self, at_work: Mapping[str, bool]) -> dict[str, pl.DataFrame]:
        for rows in self._ledger.batches():
            self._steps = self._steps.vstack(steps_of(rows)).tail(MOST_STEPS)
        steps = self._steps.tail(RECENT_STEPS)
        if steps.is_empty():
            return {}
        first, last = steps["trajectory_watermark"][0], steps["trajectory_watermark"][-1]
        where = f"{COMMIT_ORDER} >= {max(first, last - MOST_ROWS)}"
        columns = ["group_id", "generator", "version_spans", *TIMES]
        trajectories = read_rows(self.layout, "trajectories", columns, where)
        groups = groups_of(pl.DataFrame(trajectories))
        began, ended = steps["committed_at"][0], steps["committed_at"][-1]
        now = time() if any(at_work.values()) else ended
        limit = diagnosis.find_bottleneck(steps.to_dicts(), num_generators=max(1, len(at_work) - 1))
        flow = {"stages": flow_stages(self.flow, steps, groups)} if self.flow else {}
        return flow | {
            "verdict": pl.DataFrame([{"step": steps["step"][-1], **limit._asdict()}]),
            "curves": self._steps.select("step", *CURVES),
            "spans": work_spans(steps, groups, at_work=at_work, now=now),
            "swaps": steps.select(at=pl.col("committed_at") - now),
            "speeds": generator_speeds(groups, since=began, now=now),
        }


def steps_of(rows: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Return those columns and metrics of the ledger's rows that the page needs."""
    timed = ({**row, "committed_at": row["committed_at"].timestamp()} for row in rows)
    flat = ({**row["metrics"], **row} for row in timed)
    return pl.DataFrame([{name: row.get(name) for name in _STEP} for row in flat], _STEP)


def groups_of(rows: pl.DataFrame) -> pl.DataFrame:
    """Return a row for each group of the log's rows; times are in seconds since 1970."""
    tokens = pl.col("version_spans").list.eval(pl.element().struct.field("length")).list.sum()
    timed = rows.with_columns(pl.col(TIMES).dt.epoch("us") / 1e6)
    first, last = pl.col(TIMES[:2]).min(), pl.col(TIMES[2:]).max()
    return timed.group_by("group_id", "generator").agg(first, last, num_tokens=tokens.sum())


def work_spans(
    steps: pl.DataFrame, groups: pl.DataFrame, *, at_work: Mapping[str, bool], now: float
) -> pl.DataFrame:
    """Return who (`lane`) worked from when (`left`) to when (`right`), in seconds from now.

    A generator works while it has a group, the trainer while it reads, trains and stages. Who is
    at work now has a `pale` span since its last one: what it does is not in the log yet.
    """
    seconds = pl.sum_horizontal("read_s", "train_s", "stage_s")
    ended = pl.col("committed_at")
    trained = steps.select(lane=pl.lit(TRAINER), left=ended - seconds, right=ended)
    generated = groups.select(lane="generator", left=TIMES[1], right=TIMES[2])
    is_apart = pl.col("left") > pl.col("right").cum_max().shift(1).over("lane")
    spans = (
        pl.concat([trained, generated])
        .with_columns(pl.col("left", "right") - now)
        .sort("lane", "left")
        .group_by("lane", is_apart.fill_null(False).cum_sum().over("lane").alias("span"))
        .agg(pl.col("left").min(), pl.col("right").max(), pale=pl.lit(False))
        .drop("span")
        .sort("lane", "left")
    )
    for lane, works in at_work.items():
        last_end = spans.filter(lane=lane)["right"].max() or spans["left"].min()
        unknown = [lane, last_end if works else 0.0, 0.0, True]
        spans = spans.vstack(pl.DataFrame([unknown], spans.schema, orient="row"))
    return spans


def generator_speeds(groups: pl.DataFrame, *, since: float, now: float) -> pl.DataFrame:
    """Return the tokens a second of each generator, of the groups that it finished meanwhile."""
    finished = groups.filter(pl.col("finished_at") > since).group_by(lane="generator")
    speeds = finished.agg(right=pl.col("num_tokens").sum() / (now - since)).sort("lane")
    return speeds.with_columns(pl.Series("text", [f"{speed:,.0f}" for speed in speeds["right"]]))


def flow_stages(flow: Flow, steps: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """Return the way of a trajectory through the run: how many, and how long it waits there."""
    gate, so_far = flow.gate, flow.accounting
    scoring = max(0, flow.num_pending_groups * gate.settings.group_size - gate.running)
    waits: list[Any] = [(groups[end] - groups[begin]).mean() for begin, end in pairwise(TIMES)]
    queued, generated, scored, trainer = (s or 0.0 for s in (*waits, steps["wait_s"].mean()))
    max_trajectories, committed = (
        max(1, gate.running, scoring, flow.num_ready),
        max(1, so_far.committed),
    )
    rows = [
        (
            "running",
            gate.running,
            max_trajectories,
            f"now; queued {queued:.1f} s, generated {generated:.1f} s",
        ),
        ("scored", scoring, max_trajectories, f"now; queued and scored {scored:.1f} s"),
        ("committed", so_far.committed, committed, "tokens"),
        (
            "ready",
            flow.num_ready,
            max_trajectories,
            f"now; the trainer waits {trainer:.1f} s a step",
        ),
        ("trained", so_far.trained, committed, "tokens"),
        ("discarded", so_far.discarded, committed, "tokens"),
    ]
    shown = [(name, number / of, f"{number:,} {text}") for name, number, of, text in rows]
    return pl.DataFrame(shown, ["lane", "right", "text"], orient="row")


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
        made.legend.orientation, made.legend.location = "horizontal", "left"
        made.legend.margin = made.legend.padding = 0
        made.legend.border_line_color = None
        made.add_layout(made.legend[0], "above")  # in the plot it would cover a curve
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
