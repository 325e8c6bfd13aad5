"""`areal-flow view`: a live page about runs, with curves, groups, comparisons and lineage.

Each browser has its own page; a timer reads new rows. The server listens on this machine alone, and
refuses other hosts and pages of other sites. The templates escape every text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from importlib import import_module
from io import BytesIO
from itertools import groupby
from math import exp, nan, sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from time import monotonic
from typing import Any

import numpy as np
import pandas as pd
import panel as pn
import polars as pl
import pyarrow as pa
from bokeh.models import ColumnDataSource, HoverTool, TapTool
from bokeh.plotting import figure

from areal_flow.core.errors import ArealFlowError, ConfigError
from areal_flow.core.layout import RunLayout
from areal_flow.log.browse import (
    ORDERS,
    GroupSelection,
    ShownToken,
    ShownTrajectory,
    condition,
    select_groups,
    show_group,
)
from areal_flow.log.database import compared_answers, quoted
from areal_flow.log.dataset import open_dataset
from areal_flow.log.directory import observed_state
from areal_flow.log.ledger import LedgerTail
from areal_flow.log.queries import Run
from pipelines.cluster_address import tunnel_to
from pipelines.console.tables import write_table_file
from pipelines.pages import report
from pipelines.pages.charts import CHARTS, COLOURS
from pipelines.pages.report import held_out_rates

HOST = "127.0.0.1"
REFRESH_MS = 3000
IDLE_SHARE = 10
"""A refresh that took a second is followed by a pause of ten seconds."""
MAX_PAUSE_S = 10
LINEAGE_STEPS = 8
_BODY = "body { margin: 0 auto; padding: 12px 8px; max-width: 1180px; }"
_PROMPT = {"field": "prompt", "responsive": 0, "minWidth": 170}
_WIDTHS = {
    **{"run": 150, "group": 88, "reward": 98, "status": 100, "prompt": None, "tokens": 94},
    **{"versions": 104, "rewards": 120, "difficulty": 110, "members": 108},
}
"""The prompt gets the rest of the page; a narrow page hides columns, and the prompt never."""
_WIDE = {"sizing_mode": "stretch_width"}
_TABLE: dict[str, Any] = {"layout": "fit_columns", "theme": "simple"}
_TABLE |= {"widths": {name: width for name, width in _WIDTHS.items() if width}}
_TABLE |= {"page_size": 10, "pagination": "local", "show_index": False, "disabled": True}
_TABLE |= {"configuration": {"responsiveLayout": "hide", "columns": [_PROMPT]}}
_TABLE |= {"selectable": False, **_WIDE}
HELD_OUT = "held_out"
_FIGURES = ("Mean reward", "Pass rate", "Completion length", "Staleness", "Masked")
_READ = (
    *("reward_mean", "staleness_mean", "staleness_max", "metrics"),
    *("num_trained_tokens", "num_masked_tokens"),
)
_DRAWN = {"step", *(name for title in _FIGURES for name in CHARTS[title].columns.values())}
_DRAWN |= {name for title in _FIGURES for name in CHARTS[title].band or ()}
_RATES = ("step", HELD_OUT, "low", "high")
COLOUR_BY = ("policy version", "log-prob", "staleness", "advantage", "importance weight")
FORMATS = (".parquet", ".csv", ".jsonl")
MAX_ROWS = 10_000
MAX_TOKENS = 24_000
"""Per group; a browser is slow with more."""


def _html(text: str = "") -> Any:
    return pn.pane.HTML(text, stylesheets=[render("view.css")], margin=(0, 10), **_WIDE)


def _field(kind: str, label: str, width: int | None = None, **options: Any) -> Any:
    room = {"min_width": 240, **_WIDE} if width is None else {"width": width, "align": "end"}
    return getattr(pn.widgets, kind)(label=label, **room, **options)


class Page:
    """The widgets of one browser and the runs they show."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = {run.layout.name: run for run in runs}
        self.curves = [RunCurves(run, i, self._on_step) for i, run in enumerate(runs)]
        self.selection, self.group = GroupSelection(), list[ShownTrajectory]()
        self._next_refresh = 0.0
        self.heading, self.error, self.count = _html(), _html(), _html()
        self.shown, self.compared, self.lineage = _html(), _html(), _html()
        self.where = _field("TextInput", "SQL condition", placeholder="reward < 1 AND member = 0")
        self.step = _field("IntInput", "trained by step", 120, value=None, start=1)
        self.order = _field("Select", "order", 180, options=[*ORDERS])
        self.format = _field("Select", "export as", 100, options=[*FORMATS])
        self.download = _field("FileDownload", "Export rows", 130)
        hidden = ["run"] * (len(runs) == 1)
        self.table = pn.widgets.Tabulator(pd.DataFrame(), hidden_columns=hidden, **_TABLE)
        self.colour = _field("Select", "colour tokens by", 190, options=[*COLOUR_BY])
        self.same_prompt = _field("Button", "All groups of this prompt", 190)
        self.policies = [_field("Select", f"{n} policy") for n in ("first", "second")]
        self.of_run = _field("Select", "run", options=[*self.runs])
        self.version = _field("IntInput", "policy version", 120, start=0, value=0)
        self.show_lineage = _field("Button", "Show its lineage", 190)
        self.colour.visible = self.same_prompt.visible = False
        self._watch()

    def _watch(self) -> None:
        for act, widgets in (
            (self._filter, [self.where, self.step, self.order]),
            (self._show_tokens, [self.colour]),
            (self._compare, self.policies),
        ):
            for widget in widgets:
                widget.param.watch(self._guarded(act), "value")
        self.download.callback = self._guarded(self._export)
        self.show_lineage.on_click(self._guarded(self._draw_lineage))
        self.same_prompt.on_click(self._guarded(self._find_prompt))
        self.table.on_click(lambda event: self._guarded(lambda: self._open(event.row))(event))
        self._guarded(self.refresh)()
        self.version.value = self.curves[0].head

    def _guarded(self, act: Callable[[], Any]) -> Callable[..., Any]:
        """Wrap a callback: the page shows its errors, and keeps everything else as it was."""

        def acted(*events: Any) -> Any:
            try:
                result = act()
            except ArealFlowError as error:
                self.error.object = render("error.html", error=error)
                return None
            if events:  # the timer keeps an error that a user has not read yet
                self.error.object = ""
            return result

        return acted

    def _on_step(self, run: Run, step: int) -> None:
        self.of_run.value, self.version.value, self.step.value = run.layout.name, step, step or None

    def _filter(self) -> None:
        where = self.where.value.strip() or None
        self._show_groups(GroupSelection(where, self.step.value, self.order.value))

    def _show_groups(self, selection: GroupSelection) -> None:
        rows, num_matching = list[dict[str, Any]](), 0
        for run in self._runs_with(selection.step):
            groups, num = select_groups(run, selection)
            rows += [{"run": run.layout.name, **row} for row in groups]
            num_matching += num
        self.selection, self.table.value = selection, pd.DataFrame(rows, columns=[*_WIDTHS])
        text = f"{len(rows):,} of {num_matching:,} matching groups; click one to see its members."
        self.count.object = f'<p class="soft">{text}</p>'

    def _runs_with(self, step: int | None) -> list[Run]:
        """Return the runs that have the step; if none has, all, whose query then fails."""
        started = [each for each in self.curves if each.run.layout.trajectories.exists()]
        with_step = [each for each in started if each.head >= (step or 0)]
        return [each.run for each in with_step or started]

    def _open(self, row: int) -> None:
        name, index = self.table.value.iloc[row][["run", "group"]]
        self.group = show_group(self.runs[name], int(index))
        self.colour.visible = self.same_prompt.visible = True
        self._show_tokens()

    def _show_tokens(self) -> None:
        self.shown.object = render("group.html", group=self.group, colour_by=self.colour.value)

    def _find_prompt(self) -> None:
        prompt = quoted(self.group[0].row["prompt_id"])
        self.step.value, self.where.value = None, f"prompt_id = {prompt}"

    def _export(self) -> Any:
        self.download.filename = f"trajectories{self.format.value}"
        runs = self._runs_with(self.selection.step) or [*self.runs.values()]
        return export(runs, self.selection, self.format.value)

    def _compare(self) -> None:
        first, second = (policy.value for policy in self.policies)
        rows = compare(first, second) if first and second and first != second else []
        self.compared.object = render("compared.html", rows=rows)

    def _draw_lineage(self) -> None:
        lineage = self.runs[self.of_run.value].lineage(self.version.value or 0)
        hashes, sampled = lineage.last_steps(LINEAGE_STEPS)
        content = {"summary": lineage.summary(), "hashes": hashes, "sampled": sampled}
        self.lineage.object = render("lineage.html", **content)

    def refresh(self) -> None:
        """Read new rows; the slower the read, the longer the pause before the next."""
        began = monotonic()
        if began < self._next_refresh:
            return
        is_new = [each.refresh() for each in self.curves]
        if any(is_new) or not self._next_refresh:
            self._show_groups(self.selection)
        evaluated = [(each.run, step) for each in self.curves for step in each.rates.data["step"]]
        options = {f"{run.layout.name}, version {step}": (run, step) for run, step in evaluated}
        if [*options] != [*self.policies[0].options]:
            for policy, default in zip(self.policies, (evaluated[0], evaluated[-1]), strict=True):
                policy.options, policy.value = options, default
        states = [(each, observed_state(each.run.layout).state) for each in self.curves]
        self.heading.object = render("heading.html", states=states, at=datetime.now())
        self._next_refresh = monotonic() + min(MAX_PAUSE_S, IDLE_SHARE * (monotonic() - began))

    def layout(self) -> Any:
        """Return the page; it refreshes itself while a browser shows it."""
        pn.state.add_periodic_callback(self._guarded(self.refresh), REFRESH_MS)
        charts = []
        for title in _FIGURES:
            heading = _html(f"<h3>{title}</h3><p class='soft'>{CHARTS[title].meaning}</p>")
            chart = pn.pane.Bokeh(draw(title, self.curves), **_WIDE)
            charts.append(pn.Column(heading, chart, styles={"flex": "1 1 330px"}, min_width=300))
        tabs = {
            "Groups": [
                pn.FlexBox(self.where, self.step, self.order, self.format, self.download),
                *(self.count, self.table, pn.FlexBox(self.colour, self.same_prompt), self.shown),
            ],
            "Two policies": [pn.FlexBox(*self.policies), self.compared],
            "Lineage": [pn.FlexBox(self.of_run, self.version, self.show_lineage), self.lineage],
        }
        columns = ((name, pn.Column(*tab, **_WIDE)) for name, tab in tabs.items())
        below = pn.Tabs(*columns, dynamic=True, **_WIDE)  # else all are as high as the highest
        return pn.Column(self.heading, pn.FlexBox(*charts, **_WIDE), self.error, below, **_WIDE)


def serve(layouts: Sequence[RunLayout], *, port: int) -> None:
    pn.extension("tabulator", raw_css=[_BODY])
    Thread(target=import_module, args=["areal_flow.training.step"], daemon=True).start()
    server = pn.serve(
        lambda: Page([Run(layout.root) for layout in layouts]).layout(),
        address=HOST,
        port=port,
        websocket_origin=[f"{HOST}:{port}", f"localhost:{port}"],
        title="areal-flow view",
        **{"show": False, "start": False, "verbose": False},
    )
    url = f"http://{HOST}:{port}/"
    print(f"{url} shows {', '.join(layout.name for layout in layouts)}")
    print(f"On another machine run `{tunnel_to(url)}` first. Ctrl-C ends it.", flush=True)
    server.start()
    server.io_loop.start()


class RunCurves:
    """The points of one run's curves; `refresh` reads only new steps."""

    def __init__(self, run: Run, index: int, on_step: Callable[[Run, int], None]) -> None:
        """Call `on_step` with the step of a point that is clicked."""
        self.run, self.colour = run, COLOURS[index % len(COLOURS)]
        self.steps, self.rates = (
            ColumnDataSource({name: [] for name in names}) for names in (_DRAWN, _RATES)
        )
        self._ledger = LedgerTail(run.layout, _READ, since=1)
        self._evaluations = 0  # the version of the dataset that was read

        def clicked(_: str, __: Any, indices: list[int], *, source: ColumnDataSource) -> None:
            for point in indices[:1]:
                on_step(run, int(source.data["step"][point]))

        for source in (self.steps, self.rates):
            source.selected.on_change("indices", partial(clicked, source=source))

    @property
    def head(self) -> int:
        return int(max(self.steps.data["step"], default=0))

    def refresh(self) -> bool:
        """Add new steps and evaluations; return whether there were any."""
        layout, evaluations, head = self.run.layout, 0, self.head
        for rows in self._ledger.batches() if layout.steps.exists() else ():
            points = points_of(self.run, rows)
            self.steps.stream({name: [point.get(name) for point in points] for name in _DRAWN})
        if layout.evaluations.exists():
            evaluations = open_dataset(layout.evaluations).version
        if evaluations == self._evaluations:
            return self.head > head
        rates = held_out_rates(self.run)
        self.rates.data = {name: [rate[i] for rate in rates] for i, name in enumerate(_RATES)}
        self._evaluations = evaluations
        return True


def points_of(run: Run, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics of each step.

    Intervals of rewards count each prompt of a batch once, since its completions are correlated.
    """
    z, points = 1.96 / sqrt(run.recipe.groups_per_step), []
    for row in rows:
        point = {**row, **row["metrics"]}
        mean, margin = row["reward_mean"], z * point.get("rollout/reward_std", nan)
        num_tokens = row["num_trained_tokens"] + row["num_masked_tokens"]
        point |= {"reward_low": mean - margin, "reward_high": mean + margin}
        point["masked_fraction"] = row["num_masked_tokens"] / (num_tokens or nan)
        points.append(point)
    return points


def draw(title: str, curves: Sequence[RunCurves]) -> Any:
    """Return the figure of one of `CHARTS`: its first column, the band around it, and points."""
    metrics, held_out = CHARTS[title], title == "Pass rate"
    column = next(iter(metrics.columns.values()))
    quiet = {"toolbar_location": None, "tools": "", "min_border_left": 44}
    drawn, points = figure(height=190, sizing_mode="stretch_width", **quiet), []
    for each in curves:
        look: dict[str, Any] = {"color": each.colour, "source": each.steps}
        if metrics.band:
            drawn.varea("step", *metrics.band, alpha=0.15, **look)
        drawn.line("step", column, line_width=1.6, alpha=0.4 if held_out else 1.0, **look)
        if held_out:
            look["source"] = each.rates
            drawn.segment("step", "low", "step", "high", **look)
            drawn.line("step", HELD_OUT, line_width=1.6, **look)
        size, y = (7, HELD_OUT) if held_out else (4, column)
        name = each.run.layout.name
        point = drawn.scatter("step", y, size=size, name=name, nonselection_alpha=0.7, **look)
        point.selection_glyph = point.glyph.clone(size=11, line_color="black")
        points.append(point)
    tips = [
        ("", "$name"),
        ("step", "@step"),
        (title, f"@{{{HELD_OUT if held_out else column}}}{{0.000}}"),
    ]
    drawn.add_tools(TapTool(renderers=points), HoverTool(renderers=points, tooltips=tips))
    drawn.outline_line_color = drawn.axis.minor_tick_line_color = None
    drawn.axis.axis_line_color = drawn.axis.major_tick_line_color = "#999999"
    drawn.grid.grid_line_alpha, drawn.y_range.default_span = 0.4, 0.2
    return drawn


def render(template: str, **content: Any) -> str:
    helpers = {"stretches": stretches, "from_json": json.loads, "colours": COLOURS}
    return report.render(f"pages/{template}", max_tokens=MAX_TOKENS, **helpers, **content)


def stretches(member: ShownTrajectory, colour_by: str, max_tokens: int) -> list[tuple[Any, ...]]:
    """Return style, title, whether masked, and text of each stretch of tokens that look alike."""
    looks = ((*_look(n, t, member, colour_by), t) for n, t in enumerate(member.tokens[:max_tokens]))
    grouped = groupby(looks, key=lambda look: look[:3])
    return [(*look, "".join(token.text for *_, token in same)) for look, same in grouped]


def _look(index: int, token: ShownToken, member: ShownTrajectory, by: str) -> tuple[str, str, bool]:
    masked = token.trained is False or not token.chosen
    advantage = member.batch.advantage if member.batch else None
    if not token.chosen:
        return "", "not the policy's choice", masked
    match by:
        case "policy version":
            colour = COLOURS[token.version % len(COLOURS)]
            return f"background: {colour}44", f"version {token.version}", masked
        case "log-prob":
            text = f"log-prob {token.logprob:.3f}, probability {exp(token.logprob):.3f}"
            return _shade("bad", 1 - exp(token.logprob)), text, masked
        case "staleness" if token.staleness is not None:
            return _shade("bad", token.staleness / 8), f"{token.staleness} versions old", masked
        case "advantage" if advantage is not None and not masked:
            value = float(np.broadcast_to(advantage, len(member.tokens))[index])
            return _shade("good" if value > 0 else "bad", abs(value)), f"{value:+.4g}", masked
    return "", "", masked


def _shade(mark: str, strength: float) -> str:
    percent = 5 * round(14 * min(1.0, strength))
    return f"background: color-mix(in srgb, var(--{mark}) {percent}%, transparent)"


def compare(*policies: tuple[Run, int]) -> list[dict[str, Any]]:
    """Return answers of two policies to the same held-out prompts, a few for each difficulty."""
    answers = []
    for index, (run, version) in enumerate(policies):
        evaluations = run.evaluations("polars", where=f"policy_version = {version}")
        time = pl.lit(index).cast(evaluations.schema["evaluated_at"]).alias("evaluated_at")
        answers.append(evaluations.with_columns(time, policy_version=index))
    return compared_answers(pl.concat(answers).to_arrow(), pass_threshold=run.pass_threshold)


def export(runs: Sequence[Run], selection: GroupSelection, ending: str) -> BytesIO:
    """Return the matching trajectories, with the names of their runs, as the content of a file."""
    tables: list[pa.Table] = []
    for run in runs:
        matching = run.trajectories("duckdb", text=True, where=condition(run, selection))
        rows = matching.limit(MAX_ROWS + 1).to_arrow_table().sort_by("trajectory_id")
        if len(rows) > MAX_ROWS:
            raise ConfigError(
                f"expected at most {MAX_ROWS:,} rows of a run to export, found more: narrow "
                f"the condition, or use areal-flow trajectories {run.layout.name} --to FILE"
            )
        tables.append(rows.add_column(0, "run", pa.array([run.layout.name] * len(rows), "str")))
    with TemporaryDirectory(prefix="areal-flow-view-") as folder:
        path = Path(folder) / f"rows{ending}"
        write_table_file(path, tables, tables[0].schema)
        return BytesIO(path.read_bytes())
