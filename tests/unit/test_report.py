"""The report of a run: its charts, and that nothing in it is executed or loaded."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import areal_flow
from areal_flow.config import Recipe
from areal_flow.core.errors import RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.pass_rates import PASS_RATE
from areal_flow.log.directory import State, create_run
from pipelines.cli.main import main
from pipelines.jobs import job as jobs
from pipelines.jobs.job import TRAINING, recipe_to_resume
from pipelines.jobs.stop_signals import Outcome
from pipelines.pages.charts import curves, make_charts, moving_means
from pipelines.pages.report import write_report
from tests.finished_runs import make_finished_run


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run of four steps, evaluated before and after."""
    return page_of(make_finished_run(tmp_path_factory.mktemp("runs") / "r", num_steps=4))


def page_of(layout: RunLayout) -> str:
    assert areal_flow.report(layout.root) == layout.report
    return layout.report.read_text()


def test_run_is_opened_and_reported_by_its_name(tmp_path: Path) -> None:
    layout = make_finished_run(tmp_path / "mine", num_steps=1)
    assert areal_flow.report("mine", runs=tmp_path) == layout.report
    assert areal_flow.open_run("mine", runs=tmp_path).layout == layout
    assert areal_flow.open_run(str(layout.root)).layout == layout
    with pytest.raises(RunError, match=r"expected a run named 'none' in .*, found: mine"):
        areal_flow.open_run("none", runs=tmp_path)


def test_page_begins_with_health_then_answers_then_six_curves(page: str) -> None:
    rose = "Held-out pass rate rose from 0.00 to 1.00"
    order = ["finished", rose, "Mean staleness", "No completion", "<h2>Before and after"]
    order += ["✗ wrong", "✓ right", "<h2>Curves", "<h2>All else"]
    assert [page.index(text) for text in order] == sorted(page.index(text) for text in order)
    curves = page[page.index("<h2>Curves") : page.index("<h2>All else")]
    titles = re.findall("<h3>(.*?)</h3>", curves)
    assert titles == ["Pass rate", "Mean reward", "Throughput"], "the others did not change"
    folded = page[page.index("<h2>All else") :]
    for title in ("Pass rate by difficulty", "train/zeal", "train/loss"):
        assert f"<h3>{title}" in folded
    assert folded.index(">2</text>") < folded.index(">10</text>"), "difficulties ascend"
    assert "<details open" not in folded
    for text in ("1.000 [0.610, 1.000]", "groups given up: 7", "driver 1 began"):
        assert text in folded


def test_resume_with_more_steps_updates_num_steps_for_page_and_later_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, driven = make_finished_run(tmp_path / "r", num_steps=4), list[int]()

    async def drive(layout: RunLayout, recipe: Recipe, **_: object) -> Outcome:
        driven.append(recipe.num_steps)
        return Outcome(True)

    monkeypatch.setattr(jobs, "check_inputs", lambda *_, **__: [])
    monkeypatch.setattr(jobs, "accept", lambda *_: None)
    again = replace(TRAINING, drive=drive, workers=lambda recipe: [])
    first = replace(again, conclude=lambda layout: None)
    for job, given in ((first, {"num_steps": 7}), (again, {})):
        jobs.resume(job, layout, recipe_to_resume(layout, given), began=0.0)
    assert driven == [7, 7]
    assert "4 of 7 steps in" in layout.report.read_text()


def test_page_draws_nothing_twice(page: str) -> None:
    titles = re.findall("<h3>(.*?)</h3>", page)
    assert len(titles) == len(set(titles))
    rows = [{"step": n, PASS_RATE: n / 9, "pass_rate/difficulty_0": n / 9} for n in (1, 2, 3)]
    first, others = make_charts(rows, [])
    assert [chart.title for chart in (*first, *others)] == ["Pass rate"]


def test_six_curves_are_shown_at_once_and_a_reward_that_is_the_pass_rate_is_not_drawn() -> None:
    areas = [f"rollout/completion_p{share}_tokens" for share in (10, 50, 90)]
    areas += [f"speed/{name}_tokens_per_s" for name in ("generated", "trained")]
    areas += [f"speed/{name}_busy_fraction" for name in ("generators", "trainer")]
    names = ["step_s", *areas, "entropy_mean", "staleness_mean", "staleness_max", "grad_norm"]
    rows = [
        {
            "step": n,
            "reward_mean": n / 9,
            PASS_RATE: n / 9,
            **{x: n + i for i, x in enumerate(names)},
        }
        for n in (1, 2, 3)
    ]
    first, others = make_charts(rows, [])
    shown = [chart.title for chart in first]
    assert shown[:3] == ["Pass rate", "Entropy", "Staleness"]
    assert len(shown) == 6
    assert [chart.title for chart in others] == ["Busy", "train/grad_norm"]
    first, _ = make_charts([{**row, "reward_mean": 0.5} for row in rows[:2]] + rows[2:], [])
    assert [chart.title for chart in first][:2] == ["Pass rate", "Mean reward"]


def test_page_compares_nothing_that_another_verifier_scored(tmp_path: Path) -> None:
    layout = make_finished_run(tmp_path / "r", num_steps=3, accepted_at=2)
    page = page_of(layout)
    assert "another verifier scored from here on: numeric@1" in page
    assert "Pass rate of batches" in page
    assert "Held-out pass rate " not in page
    assert "<h2>Before and after" not in page
    assert "<details open><summary>Trajectories" in page, "nothing else shows what was written"


def test_page_of_a_hostile_policy_runs_nothing_and_loads_nothing(page: str) -> None:
    assert "&lt;script&gt;alert(1)" in page
    for tag in ("<script", "<img", "<link", "<iframe", "<object", "@import"):
        assert tag not in page
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)
    assert not re.search(r"url\((?!#)", page)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("state", ["finished", "crashed"])
def test_page_of_a_short_run_has_what_there_is(
    num_steps: int, evaluated: bool, state: State, tmp_path: Path
) -> None:
    page = page_of(
        make_finished_run(tmp_path / "r", num_steps=num_steps, evaluated=evaluated, state=state)
    )
    assert state in page
    assert ("<h3>Pass rate" in page) == (num_steps > 1 or (evaluated and num_steps > 0))
    assert ("No step has finished yet" in page) == (num_steps == 0)
    assert ("<h2>Before and after" in page) == (evaluated and num_steps > 0)
    assert ("Held-out pass rates and rewards" in page) == evaluated


def test_report_command_says_where_the_page_is_and_what_it_cannot_draw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = make_finished_run(tmp_path / "r", num_steps=1)
    given = ["--runs", str(tmp_path), "report", "r"]
    assert main(given) == 0
    assert str(layout.report) in capsys.readouterr().out
    assert main([*given, "--to", str(tmp_path / "own.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == str(tmp_path / "own.html")
    assert (tmp_path / "own.html").read_text().startswith("<!doctype html>")
    assert main([*given, "--to", str(tmp_path / "nowhere" / "own.html")]) == 2
    assert "a folder that exists" in capsys.readouterr().err
    create_run(RunLayout(tmp_path / "new"), Recipe())
    assert main([*given[:-1], "new"]) == 1
    assert "found no ledger" in capsys.readouterr().err


def test_charts_are_svg_that_loads_nothing() -> None:
    drawn = curves(
        {"a": [0.0, None, 2.0], "b": [1.0, 1.0, 1.0]},
        [1, 2, 3],
        held_out=[(0, 0.5, 0.4, 0.6), (3, 0.5, 0.4, 0.6)],
    )
    assert drawn.startswith("<svg")
    assert all(f">{name}</text>" in drawn for name in ("a", "b", "held-out, 95%"))
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", drawn)


def test_mean_of_a_curve_is_over_eight_steps_and_passes_over_gaps() -> None:
    series = [1.0, None, 3.0, math.inf, *[5.0] * 8, 13.0]
    means = moving_means(pl.Series(series)).to_numpy()
    finite = np.where(np.isinf(np.array(series, float)), np.nan, np.array(series, float))
    brute = [np.nanmean(finite[max(0, i - 7) : i + 1]) for i in range(len(series))]
    np.testing.assert_allclose(means, brute)
    assert means[2] == 2


def test_long_run_is_drawn_in_at_most_a_thousand_points_a_line() -> None:
    drawn = curves({"a": [*map(float, range(20_000))]}, [*range(20_000)])
    assert len(drawn) < 100_000


def test_page_of_two_runs_has_token_accounting_and_costs_of_both(tmp_path: Path) -> None:
    first, second = (make_finished_run(tmp_path / name, num_steps=4) for name in ("one", "two"))
    second.workers.unlink()
    path = write_report(
        first, tmp_path / "both.html", against=RunLayout(second.root), prices={"cpu": 9.0}
    )
    page = re.sub(r"\s+", " ", path.read_text()).replace("</td><td>", "</td> <td>")
    page = page.replace("<td> ", "<td>").replace(" </td>", "</td>")
    assert "<h2>one and two</h2>" in page
    assert all(page.count(f">{name}</text>") > 1 for name in ("one", "two")), "lines of both"
    assert "<th>one</th><th>two</th>" in page
    assert "<td>costs are in</td> <td>money</td> <td>unknown</td>" in page
    idle = "<td>cost of idle devices</td> <td>0.02</td> <td></td>"
    assert idle in page, "two workers, 4 s of 3,600 at 9"
    assert "<td>cost of the whole run</td> <td>0.02</td> <td></td>" in page
    assert "<td>chain breaks</td>" in page


def test_report_takes_no_negative_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_finished_run(tmp_path / "r", num_steps=1)
    given = ["--runs", str(tmp_path), "report", "r"]
    assert main([*given, "--price", "-1"]) == 2
    assert "--price -1" in capsys.readouterr().err
    assert main([*given, "--against", "nobody"]) == 1
    assert "nobody" in capsys.readouterr().err
