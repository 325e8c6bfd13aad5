"""Learning rates by step: golden numbers, the floor, and a horizon that no resume moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_flow.config import Recipe, build_recipe, dump_recipe, load_recipe
from areal_flow.training.settings import FLOOR, RateSchedule, TrainerSettings, scheduled_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 0.806, 0.612, 0.418, 0.224, 0.03]),
        ("cosine", [0.25, 0.5, 0.75, 1, 0.9073732, 0.6648732, 0.3651268, 0.1226268, 0.03]),
    ],
)
def test_rates_of_three_steps_of_warm_up_and_eight_in_all(
    schedule: RateSchedule, expected: list[float]
) -> None:
    rates = [
        scheduled_rate(2.0, step=t, schedule=schedule, num_warmup_steps=3, num_decay_steps=8)
        for t in range(1, 10)
    ]
    assert rates == pytest.approx([2 * rate for rate in expected], abs=2e-7)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_rate_falls_to_the_floor_and_stays_there(schedule: RateSchedule) -> None:
    rates = [
        scheduled_rate(1.0, step=t, schedule=schedule, num_warmup_steps=0, num_decay_steps=20)
        for t in range(1, 40)
    ]
    assert rates[0] == 1.0
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates[:21])) == 21
    assert set(rates[20:]) == {FLOOR}


def test_horizon_within_the_warm_up_leaves_the_floor_after_it() -> None:
    rates = [
        scheduled_rate(1.0, step=t, schedule="linear", num_warmup_steps=4, num_decay_steps=2)
        for t in (4, 5, 6)
    ]
    assert rates == pytest.approx([0.8, 1.0, FLOOR])


def test_default_is_the_warm_up_and_then_the_whole_rate() -> None:
    settings = TrainerSettings(learning_rate=0.6, num_warmup_steps=2)
    rates = [settings.learning_rate_at(step) for step in range(1, 6)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.6, 0.6])


def test_horizon_is_the_number_of_steps_that_the_run_is_made_with(tmp_path: Path) -> None:
    made = build_recipe(
        {"num_steps": 40, "trainer": {"learning_rate_schedule": "cosine"}}, source="test"
    )
    assert made.trainer.num_decay_steps == 40
    (tmp_path / "config.toml").write_text(dump_recipe(made))
    resumed = load_recipe(tmp_path / "config.toml", {"num_steps": 90})
    assert resumed.num_steps == 90
    assert resumed.trainer == made.trainer
    assert resumed.digest() == made.digest()


def test_horizon_that_is_given_stays_and_a_constant_rate_needs_none() -> None:
    trainer = TrainerSettings(learning_rate_schedule="linear", num_decay_steps=7)
    assert Recipe(trainer=trainer).trainer.num_decay_steps == 7
    assert Recipe().trainer.num_decay_steps == 0
    assert Recipe(num_steps=5).digest() == Recipe(num_steps=6).digest()
