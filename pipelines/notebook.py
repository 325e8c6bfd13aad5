"""Runs with what notebooks display: charts drawn by the report's functions, and HTML.

Text of prompts and completions is escaped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from areal_flow.core.pass_rates import PASS_RATE
from areal_flow.log import queries
from areal_flow.log.browse import Selection, show_trajectory
from areal_flow.log.directory import find_run, observed_state

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Run(queries.Run):
    __doc__ = queries.Run.__doc__

    @property
    def plot(self) -> Plots:
        """Charts: `reward()`, `staleness()`, `lengths()` and `timeline()`."""
        return Plots(self)

    def trajectory(self, trajectory_id: str) -> Trajectory:
        return Trajectory(self, super().trajectory(trajectory_id))

    def key_figures(self) -> dict[str, Any]:
        """Return state, length, and what changed from the first steps to the last ones."""
        from pipelines.pages.report import held_out_rates

        facts = {"run": self.layout.name, "state": observed_state(self.layout).state}
        columns = ["reward_mean", "step_s", "num_trained_tokens", "staleness_mean"]
        if self.layout.steps.exists() and len(steps := self.steps(columns=columns)[1:]):
            first, last = steps.reward_mean.head(8).mean(), steps.reward_mean.tail(8).mean()
            facts["steps"] = f"{len(steps):,} in {steps.step_s.sum():,.0f} s"
            facts["mean reward"] = f"{first:.3f} → {last:.3f}, means of 8 steps"
            facts["tokens trained"] = f"{steps.num_trained_tokens.sum():,}"
            facts["mean staleness"] = f"{steps.staleness_mean.mean():.2f}"
        if rates := held_out_rates(self):
            (_, before, *_), (_, after, low, high) = rates[0], rates[-1]
            interval = f"{after:.3f} [{low:.3f}, {high:.3f}]"
            facts["held-out pass rate"] = f"{before:.3f} → {interval}" if rates[1:] else interval
        return facts

    def _repr_html_(self) -> str:
        from pipelines.pages.report import render

        return render("pages/notebook.html", facts=self.key_figures(), shown=None)


class Trajectory(dict[str, Any]):
    """A row of the view `trajectories`; a notebook shows its tokens, coloured by policy version.

    Tokens without gradient are pale; hovering over a token shows its log-probability.
    """

    def __init__(self, run: Run, row: dict[str, Any]) -> None:
        super().__init__(row)
        self._run = run

    def _repr_html_(self) -> str:
        from pipelines.pages.charts import COLOURS
        from pipelines.pages.report import render

        shown = show_trajectory(self._run, self["trajectory_id"], selection=Selection())
        names = ("trajectory_id", "status", "step", "reward", "verdict", "staleness")
        facts = {**{name: self[name] for name in names}, "answer": shown.answer}
        return render("pages/notebook.html", facts=facts, shown=shown, colours=COLOURS)


class ReportPage(PosixPath):
    """The path of a run's report; a notebook shows the run's key figures and the page."""

    facts: Mapping[str, Any] = MappingProxyType({})

    def _repr_html_(self) -> str:
        from pipelines.pages.report import render

        page = os.path.relpath(self)
        return render("pages/notebook.html", facts=self.facts, shown=None, page=page)


class Plots:
    """Each method draws on `ax`, or on a new figure, and returns the axes."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def reward(self, ax: Axes | None = None) -> Axes:
        """Draw mean reward and pass rate of batches, and the pass rates of held-out answers."""
        from pipelines.pages.report import held_out_rates

        rates = held_out_rates(self._run)
        return self._curves({"mean reward": "reward_mean", "pass rate": PASS_RATE}, ax, rates)

    def staleness(self, ax: Axes | None = None) -> Axes:
        """Draw mean and maximum staleness of trained tokens, in policy versions."""
        return self._chart("Staleness", ax)

    def lengths(self, ax: Axes | None = None) -> Axes:
        """Draw the 10th, 50th and 90th percentile of completion lengths, in tokens."""
        return self._chart("Completion length", ax)

    def timeline(self, ax: Axes | None = None, *, num_steps: int = 5) -> Axes:
        """Draw when groups were generated and steps trained, for steps in the middle of the run."""
        last = int(self._run.steps("arrow", columns=["step"])["step"][-1])
        first = max(0, (last + 1 - num_steps) // 2)
        shown = self._run.steps(where=f"step BETWEEN {first} AND {first + num_steps}")
        began, ended = shown.committed_at.iloc[0], shown.committed_at.iloc[-1]
        columns = ["trajectory_id", "version_spans", "started_at", "finished_at"]
        where = f"finished_at >= timestamp '{began}' AND started_at <= timestamp '{ended}'"
        where += " AND finish_reason <> 'error'"  # which no version sampled
        rows = self._run.trajectories(columns=columns, where=where)
        rows["version"] = [min(span["version"] for span in spans) for spans in rows.version_spans]
        parts = {"began": ("started_at", "min"), "ended": ("finished_at", "max")}
        groups = rows.groupby(rows.trajectory_id.str[:8]).agg(version=("version", "min"), **parts)
        return _draw("draw_timeline", ax, shown, groups.sort_values("began"))

    def _chart(self, title: str, ax: Axes | None) -> Axes:
        from pipelines.pages.charts import CHARTS

        return self._curves(CHARTS[title].columns, ax)

    def _curves(self, columns: Mapping[str, str], ax: Axes | None, held_out: Any = ()) -> Axes:
        rows = self._run.steps("arrow", where="step > 0").to_pylist()
        lines = {label: [row.get(name) for row in rows] for label, name in columns.items()}
        return _draw("draw_curves", ax, lines, [row["step"] for row in rows], held_out)


def open_run(run: Path | str, *, runs: Path | str = "runs") -> Run:
    """Open a run for reading, by its path or by its name in the folder `runs`.

    Raises:
        RunError: there is no run.
    """
    return Run(run if isinstance(run, Path) else find_run(Path(runs), run).root)


def _draw(function: str, ax: Axes | None, *arguments: Any) -> Axes:
    from matplotlib import pyplot

    from pipelines.pages import charts

    axes: Axes = ax or pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")[1]
    getattr(charts, function)(axes, *arguments)
    return axes
