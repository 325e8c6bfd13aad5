"""A short form of `tests/chaos.py`: every role, two drivers and one scheduler are struck."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import run_chaos

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_run_that_is_killed_eight_times_loses_nothing(tmp_path: Path) -> None:
    report = run_chaos(tmp_path, num_strikes=8, seed=199, num_generators=1)
    log = (tmp_path / "drivers.log").read_text()
    assert {strike.split()[0] for strike in report["strikes"]} == {
        *("driver", "scheduler", "generator", "trainer", "reward")
    }
    assert report["final_exit_code"] == 143, log
    assert report["num_audits"] > 8, "a clean audit after every strike and at the end"
    assert report["num_trained_twice"] == 0
    assert report["num_refused_drivers"] == 1, log
    assert report["recorded_weights_hash"] == report["replayed_weights_hash"]
    assert report["num_weights"] > report["num_steps"] / 2, (
        "steps that change nothing prove nothing"
    )
