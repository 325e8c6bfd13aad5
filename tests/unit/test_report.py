"""The page about a run: what is drawn, and that nothing in it is executed or loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import areal_flow
from areal_flow.config import Recipe
from areal_flow.layout import RunLayout
from areal_flow.recovery.run_directory import State, create_run
from pipelines.cli.main import main
from pipelines.report import svg
from tests.finished_runs import make_finished_run


def page_of(layout: RunLayout) -> str:
    assert areal_flow.report(layout.root) == layout.report
    return layout.report.read_text()


def test_page_shows_how_a_run_went(tmp_path: Path) -> None:
    page = page_of(make_finished_run(tmp_path / "r", num_steps=4))
    for said in ("finished", "Held-out pass rate, version 4", "1.000 [0.610, 1.000]", "4 in 4 s"):
        assert said in page
    scores, speed = ("Mean reward", "Pass rate"), ("Time of a step", "Throughput")
    for title in (*scores, *speed, "Staleness", "Length", "Loss", "Zeal"):
        assert f"<h3>{title}" in page
    for title in ("Pass rate by difficulty", "Throughput"):
        assert page.count(f"<h3>{title}") == 1
    assert page.index(">2</text>") < page.index(">10</text>"), "difficulties ascend"
    for shown_elsewhere in ("Rollout/pass rate", "Pass rate/difficulty", "Speed/"):
        assert shown_elsewhere not in page
    assert '<span class="bad">reward 0<' in page
    assert '<span class="good">reward 1, passes<' in page
    assert "groups given up: 7" in page
    assert "driver 1 began" in page


def test_page_compares_nothing_that_another_verifier_scored(tmp_path: Path) -> None:
    layout = make_finished_run(tmp_path / "r", num_steps=3, accepted_at=2)
    page = page_of(layout)
    assert "another verifier scored from here on: numeric@1" in page
    assert "Held-out pass rate, version 3" in page
    assert "version 0" not in page
    assert "<h2>Held-out" not in page


def test_page_of_a_hostile_policy_runs_nothing_and_loads_nothing(tmp_path: Path) -> None:
    page = page_of(make_finished_run(tmp_path / "r", num_steps=2))
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
    assert ("<h2>Curves" in page) == (num_steps > 0)
    assert ("<h2>Held-out" in page) == (evaluated and num_steps > 0)
    assert ("Held-out pass rate, version 0" in page) == evaluated


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
    drawn = svg.curves(
        {"a": [0.0, None, 2.0], "b": [1.0, 1.0, 1.0]},
        steps=[1, 2, 3],
        label="value",
        held_out=[(0, 0.5, 0.4, 0.6), (3, 0.5, 0.4, 0.6)],
    )
    assert drawn.startswith("<svg")
    assert all(f">{name}</text>" in drawn for name in ("a", "b", "held-out, 95%"))
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", drawn)


def test_mean_of_a_curve_is_over_eight_steps_and_passes_over_gaps() -> None:
    series = np.array([1.0, np.nan, 3.0, *[5.0] * 8, 13.0])
    means = svg._moving_means(series)
    brute = [np.nanmean(series[max(0, i - 7) : i + 1]) for i in range(len(series))]
    np.testing.assert_allclose(means, brute)
    assert means[2] == 2


def test_histogram_of_wide_numbers_has_few_bars_and_loses_none() -> None:
    lengths = dict.fromkeys(range(1000), 1)
    drawn = svg.histogram({"tokens": lengths}, xlabel="tokens", ylabel="share")
    num_bars = drawn.count('<g id="patch_') - 5  # the figure, the axes and its spines
    assert 50 <= num_bars <= 62
