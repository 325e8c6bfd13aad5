"""The page about a run: what is drawn, and that nothing in it is executed or loaded."""

from __future__ import annotations

import re

import numpy as np

from areal_flow.recovery.run_directory import RunState
from areal_flow.types import PassRate
from pipelines import report_charts
from pipelines.report import Chart, render

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(2)>"


def test_whatever_a_policy_writes_is_text_in_the_page() -> None:
    page = render(
        run=HOSTILE,
        state=RunState("failed", reason=HOSTILE),
        model=HOSTILE,
        verifiers=[HOSTILE],
        recipe=HOSTILE,
        figures={"steps": HOSTILE},
        charts=[Chart(HOSTILE, HOSTILE, "<svg></svg>")],
        samples=[
            {
                **dict.fromkeys(("difficulty", "prompt", "answer", "before", "after"), HOSTILE),
                "reward_before": None,
                "reward_after": 1.0,
            }
        ],
        trained_samples=[{"step": 1, "prompt": HOSTILE, "completion": HOSTILE, "reward": 0.0}],
        events=[("step 1", HOSTILE)],
    )
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("&lt;script&gt;") >= 14
    assert "<svg></svg>" in page


def test_charts_are_svg_that_loads_nothing() -> None:
    rate = PassRate(0.5, 0.4, 0.6, 100)
    svg = report_charts.curves(
        {"a": [0.0, None, 2.0], "b": [1.0, 1.0, 1.0]},
        steps=[1, 2, 3],
        label="value",
        held_out={0: rate, 3: rate},
    )
    assert svg.startswith("<svg")
    assert all(name in svg for name in ("a", "b", "held-out pass rate"))
    assert not re.search(r"(href|src)=\"http", svg)
    assert "url(http" not in svg


def test_mean_of_a_curve_is_over_eight_steps_and_passes_over_gaps() -> None:
    series = np.array([1.0, np.nan, 3.0, *[5.0] * 8, 13.0])
    means = report_charts._moving_means(series)
    brute = [np.nanmean(series[max(0, i - 7) : i + 1]) for i in range(len(series))]
    np.testing.assert_allclose(means, brute)
    assert means[2] == 2


def test_histogram_of_wide_numbers_has_few_bars_and_loses_none() -> None:
    lengths = dict.fromkeys(range(1000), 1)
    svg = report_charts.histogram({"tokens": lengths}, xlabel="tokens", ylabel="share")
    num_bars = svg.count('<g id="patch_') - 5  # the figure, the axes and its spines
    assert 50 <= num_bars <= 62
