"""One browser's page: what is chosen in it decides what is read, and a timer reads what is new.

Pages are served on this machine alone: other hosts, and pages of other sites, get nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from importlib import import_module
from threading import Thread
from time import monotonic
from typing import Any

import pandas as pd
import panel as pn

from areal_flow.core.errors import ArealFlowError
from areal_flow.core.layout import RunLayout
from areal_flow.log.browsing import QUOTE, ShownTrajectory
from areal_flow.log.directory import observed_state
from areal_flow.log.groups import ORDERS, GroupSelection, select_groups, show_group
from areal_flow.log.queries import Run
from pipelines.view import shown
from pipelines.view.curves import FIGURES, RunCurves, draw
from pipelines.workers import tunnel_to

HOST = "127.0.0.1"
REFRESH_MS = 3000
IDLE_SHARE = 10
"""A refresh that took a second is followed by ten seconds without one."""
LINEAGE_STEPS = 8
_STYLE = shown.render("style.css")
_BODY = "body { margin: 0 auto; padding: 12px 8px; max-width: 1180px; }"
_WIDTHS = {
    **{"run": 150, "group": 80, "reward": 90, "status": 110, "prompt": 330, "tokens": 84},
    **{"versions": 96, "rewards": 96, "difficulty": 104, "members": 96},
}
_WIDE = {"sizing_mode": "stretch_width"}
_TABLE: dict[str, Any] = {"layout": "fit_data_stretch", "theme": "simple", "widths": _WIDTHS}
_TABLE |= {"page_size": 10, "pagination": "local", "show_index": False, "disabled": True}
_TABLE |= {"configuration": {"responsiveLayout": "hide"}, "selectable": False, **_WIDE}


def _html(text: str = "") -> Any:
    return pn.pane.HTML(text, stylesheets=[_STYLE], margin=(0, 10), **_WIDE)


def _field(kind: str, label: str, width: int | None = None, **options: Any) -> Any:
    room = {"min_width": 240, **_WIDE} if width is None else {"width": width, "align": "end"}
    return getattr(pn.widgets, kind)(label=label, **room, **options)


class Page:
    """The widgets of one browser, and the runs that they are about."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = {run.layout.name: run for run in runs}
        self.curves = [RunCurves(run, place, self._on_step) for place, run in enumerate(runs)]
        self.selection, self.group = GroupSelection(), list[ShownTrajectory]()
        self._next_refresh = 0.0
        self.heading, self.error, self.found = _html(), _html(), _html()
        self.shown, self.compared, self.lineage = _html(), _html(), _html()
        self.where = _field("TextInput", "SQL condition", placeholder="reward < 1 AND member = 0")
        self.step = _field("IntInput", "trained by step", 120, value=None, start=1)
        self.order = _field("Select", "order", 180, options=[*ORDERS])
        self.format = _field("Select", "export as", 100, options=[*shown.FORMATS])
        self.download = _field("FileDownload", "Export rows", 130)
        hidden = ["run"] * (len(runs) == 1)
        self.table = pn.widgets.Tabulator(pd.DataFrame(), hidden_columns=hidden, **_TABLE)
        self.colour = _field("Select", "colour tokens by", 190, options=[*shown.COLOUR_BY])
        self.same = _field("Button", "All groups of this prompt", 190)
        self.policies = [_field("Select", f"{n} policy") for n in ("first", "second")]
        self.of_run = _field("Select", "run", options=[*self.runs])
        self.version = _field("IntInput", "policy version", 120, start=0, value=0)
        self.draw = _field("Button", "Show its lineage", 190)
        self.colour.visible = self.same.visible = False
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
        self.draw.on_click(self._guarded(self._draw_lineage))
        self.same.on_click(self._guarded(self._find_prompt))
        self.table.on_click(lambda event: self._guarded(lambda: self._open(event.row))(event))
        self._guarded(self.refresh)()
        self.version.value = self.curves[0].head

    def _guarded(self, act: Callable[[], Any]) -> Callable[..., Any]:
        """Return `act` as a callback whose errors the page shows, and which change nothing else."""

        def acted(*events: Any) -> Any:
            try:
                result = act()
            except ArealFlowError as error:
                self.error.object = shown.render("error.html", error=error)
                return None
            if events:  # the timer leaves what a user was told
                self.error.object = ""
            return result

        return acted

    def _on_step(self, run: Run, step: int) -> None:
        self.of_run.value, self.version.value, self.step.value = run.layout.name, step, step or None

    def _filter(self) -> None:
        where = self.where.value.strip() or None
        self._show_groups(GroupSelection(where, self.step.value, self.order.value))

    def _show_groups(self, chosen: GroupSelection) -> None:
        rows, num_matching = list[dict[str, Any]](), 0
        for run in self._runs_with(chosen.step):
            groups, num = select_groups(run, chosen)
            rows += [{"run": run.layout.name, **row} for row in groups]
            num_matching += num
        self.selection, self.table.value = chosen, pd.DataFrame(rows, columns=[*_WIDTHS])
        text = f"{len(rows):,} of {num_matching:,} matching groups; click one to see its members."
        self.found.object = f'<p class="soft">{text}</p>'

    def _runs_with(self, step: int | None) -> list[Run]:
        """Return the runs that have the step; all, which says so, if none has."""
        begun = [each for each in self.curves if each.run.layout.trajectories.exists()]
        having = [each for each in begun if each.head >= (step or 0)]
        return [each.run for each in having or begun]

    def _open(self, place: int) -> None:
        name, index = self.table.value.iloc[place][["run", "group"]]
        self.group = show_group(self.runs[name], int(index))
        self.colour.visible = self.same.visible = True
        self._show_tokens()

    def _show_tokens(self) -> None:
        self.shown.object = shown.render(
            "group.html", group=self.group, colour_by=self.colour.value
        )

    def _find_prompt(self) -> None:
        prompt = self.group[0].row["prompt_id"].replace(QUOTE, QUOTE * 2)
        self.step.value, self.where.value = None, f"prompt_id = '{prompt}'"

    def _export(self) -> Any:
        self.download.filename = f"trajectories{self.format.value}"
        runs = self._runs_with(self.selection.step) or [*self.runs.values()]
        return shown.export(runs, self.selection, self.format.value)

    def _compare(self) -> None:
        one, another = (policy.value for policy in self.policies)
        rows = shown.compare(one, another) if one and another and one != another else []
        self.compared.object = shown.render("compared.html", rows=rows)

    def _draw_lineage(self) -> None:
        lineage = self.runs[self.of_run.value].lineage(self.version.value or 0)
        hashes, sampled = lineage.last_steps(LINEAGE_STEPS)
        content = {"summary": lineage.summary(), "hashes": hashes, "sampled": sampled}
        self.lineage.object = shown.render("lineage.html", **content)

    def refresh(self) -> None:
        """Read what is new; after a slow read the next one waits longer."""
        began = monotonic()
        if began < self._next_refresh:
            return
        is_new = [each.refresh() for each in self.curves]
        if any(is_new) or not self._next_refresh:
            self._show_groups(self.selection)
        made = [(each.run, version) for each in self.curves for version in each.rates.data["step"]]
        options = {f"{run.layout.name}, version {version}": (run, version) for run, version in made}
        if [*options] != [*self.policies[0].options]:
            for policy, place in zip(self.policies, (0, -1), strict=True):
                policy.options, policy.value = options, made[place]
        states = [(each, observed_state(each.run.layout).state) for each in self.curves]
        self.heading.object = shown.render("heading.html", states=states, at=datetime.now())
        self._next_refresh = monotonic() + IDLE_SHARE * (monotonic() - began)

    def layout(self) -> Any:
        """Return the page, which refreshes itself while a browser shows it."""
        pn.state.add_periodic_callback(self._guarded(self.refresh), REFRESH_MS)
        charts = []
        for name, texts in FIGURES.items():
            title = _html("<h3>{}</h3><p class='soft'>{}</p>".format(*texts))
            figure = pn.pane.Bokeh(draw(name, self.curves), **_WIDE)
            charts.append(pn.Column(title, figure, styles={"flex": "1 1 330px"}, min_width=300))
        tabs = {
            "Groups": [
                pn.FlexBox(self.where, self.step, self.order, self.format, self.download),
                *(self.found, self.table, pn.FlexBox(self.colour, self.same), self.shown),
            ],
            "Two policies": [pn.FlexBox(*self.policies), self.compared],
            "Lineage": [pn.FlexBox(self.of_run, self.version, self.draw), self.lineage],
        }
        below = pn.Tabs(*((name, pn.Column(*tab, **_WIDE)) for name, tab in tabs.items()), **_WIDE)
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
