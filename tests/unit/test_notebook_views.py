"""What a notebook shows of runs and trajectories; nothing that a policy wrote is executed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pyarrow as pa
import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex

import areal_flow
from areal_flow.core.layout import RunLayout
from areal_flow.core.pass_rates import tabulate
from areal_flow.log.browse import ShownToken
from pipelines.jobs.evaluate import EvaluationResult
from pipelines.pages.charts import COLOURS
from schemas import PromptRow, arrow_schema
from tests import notebooks
from tests.finished_runs import HOSTILE, make_finished_run


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    made = make_finished_run(tmp_path_factory.mktemp("runs") / "r", num_steps=4)
    made.train_prompts.parent.mkdir(exist_ok=True)
    with pa.ipc.new_file(made.train_prompts, arrow_schema(PromptRow)) as file:
        file.write(pa.Table.from_pylist([], arrow_schema(PromptRow)))
    return made


def test_charts_draw_on_given_axes_or_on_a_new_figure(layout: RunLayout) -> None:
    run = areal_flow.open_run(layout.root)
    with mpl.rc_context({"backend": "agg"}):
        _, given = pyplot.subplots()
        assert run.plot.staleness(given) is given
        reward = run.plot.reward()
        assert reward is not given
        labels = reward.get_legend_handles_labels()[1]
        assert labels == ["mean reward", "pass rate", "held-out, 95%"]
        thin, strong = reward.lines[:2]
        assert [*thin.get_xdata()] == [1, 2, 3, 4]
        assert [*thin.get_ydata()] == pytest.approx([0.1, 0.2, 0.3, 0.4])
        assert [*strong.get_ydata()] == pytest.approx([0.1, 0.15, 0.2, 0.25])
        assert len(run.plot.lengths().lines) == 6
        pyplot.close("all")


def test_timeline_has_a_bar_for_each_group_in_the_colour_of_its_version(layout: RunLayout) -> None:
    run = areal_flow.open_run(layout.root)
    with mpl.rc_context({"backend": "agg"}):
        axes = run.plot.timeline(num_steps=10)
        steps = [text.get_text() for text in axes.texts]
        assert steps == ["1", "v1", "2", "v2", "3", "v3", "4", "v4"]
        colours = {to_hex(bars.get_facecolor()[0]) for bars in axes.collections}
        assert colours <= {*COLOURS}
        pyplot.close("all")


def test_run_has_an_html_summary_even_without_steps(layout: RunLayout, tmp_path: Path) -> None:
    shown = areal_flow.open_run(layout.root)._repr_html_()
    for text in (">r<", ">finished<", "4 in 4 s", "0.250 → 0.250"):
        assert text in shown
    new = make_finished_run(tmp_path / "new", num_steps=0, evaluated=False)
    assert ">steps<" not in areal_flow.open_run(new.root)._repr_html_()


def test_report_is_a_path_that_a_notebook_shows_with_key_figures_and_the_page(
    layout: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pages").mkdir()
    page = areal_flow.report(layout.root, to=tmp_path / "pages" / "r&d.html")
    assert page.read_text().startswith("<!doctype html>")
    assert f"{page}" == str(tmp_path / "pages" / "r&d.html")
    shown = page._repr_html_()
    assert 'href="pages/r&amp;d.html"' in shown
    assert '<iframe src="pages/r&amp;d.html"' in shown
    assert re.search(r">held-out pass rate<.*>0\.000 → 1\.000 \[0\.\d{3}, 1\.000\]<", shown)


def test_evaluation_is_one_line_and_in_a_notebook_a_table() -> None:
    def answer(difficulty: int, reward: float) -> dict[str, Any]:
        row = {"prompt_id": f"{difficulty}", "sample": 0, "num_output_tokens": 4}
        return {**row, "held_out": "held_out", "difficulty": difficulty, "reward": reward}

    answers = [answer(1, 1.0), answer(2, 0.0)]
    table = tabulate(answers, threshold=0.5)
    result = EvaluationResult(table, answers, "<b>mine</b>")
    assert (
        repr(result)
        == "<EvaluationResult <b>mine</b>: pass rate 0.500 [0.095, 0.905] of 2 prompts>"
    )
    shown = result._repr_html_()
    assert "&lt;b&gt;mine" in shown
    assert re.findall(r"<tr><td>(\w+)</td><td>(\d)</td>", shown) == [
        ("1", "1"),
        ("2", "1"),
        ("all", "2"),
    ]
    assert "<td>0.500 [0.095, 0.905]</td>" in shown


def test_trajectory_shows_its_tokens_and_runs_nothing(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = areal_flow.open_run(layout.root)
    trajectory = run.trajectory(run.trajectories().trajectory_id[0])
    assert trajectory["status"] == "trained"
    shown = trajectory._repr_html_()
    tokens = re.findall(r'<span title="version 0, log-probability -?\d\.\d{3}, id \d+"', shown)
    assert len(tokens) == trajectory["num_tokens"]
    from areal_flow.log import browse

    def hostile(*_: object) -> tuple[ShownToken, ...]:
        return (ShownToken(HOSTILE, 1, 3, -0.5, 1, False, True),)

    monkeypatch.setattr(browse, "_tokens", hostile)
    shown = trajectory._repr_html_()
    assert "&lt;script&gt;alert(1)" in shown
    assert "<script" not in shown
    assert "<img" not in shown
    assert f"{COLOURS[3]}44; opacity: .45" in shown


@pytest.mark.slow
def test_explore_notebook_runs_over_the_newest_run(layout: RunLayout, tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(layout.root.parent)
    notebook = notebooks.execute("explore", tmp_path)
    assert notebooks.shape(notebook) == notebooks.shape(notebooks.read("explore"))
    data = [o.get("data", {}) for cell in notebook.cells for o in cell.get("outputs", ())]
    assert sum("image/png" in shown for shown in data) >= 2
    assert sum("text/html" in shown for shown in data) >= 3


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_committed_notebook_has_outputs_of_every_cell_that_shows_something(name: str) -> None:
    notebook = notebooks.read(name)
    (run_cells,) = [[c for c in notebook.cells if c.cell_type == "code"]]
    assert all(cell.execution_count for cell in run_cells), "run `python -m tests.notebooks`"
    kinds = {kind for cell in notebooks.shape(notebook) for kind in cell["kinds"]}
    assert {"image/png", "text/html"} <= kinds
    assert "error" not in kinds
    text = (notebooks.EXAMPLES / f"{name}.ipynb").read_text()
    assert len(text) < notebooks.MAX_BYTES
    assert not re.search(r"/(home|root|tmp|work)/", text), "a path of the machine that ran it"
