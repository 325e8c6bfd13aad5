"""What the soak's fits of growth show, and what they do not."""

from __future__ import annotations

import random

import pytest

from benchmarks.soak import growth_in_lives, growth_over_lives

Life = list[tuple[float, float]]


def lives_of(*, in_life: float = 0.0, with_run: float = 0.0, warm_up: float = 0.0) -> list[Life]:
    """Return noisy values of eight lives; growth is per 1,000 steps, a warm-up ends at half."""
    noise = random.Random(0)
    return [
        [
            (
                250 * life + step,
                400
                + in_life * step / 1000
                + with_run * (250 * life + step) / 1000
                + warm_up * min(step, 100)
                + noise.gauss(0, 0.5),
            )
            for step in range(5, 250, 5)
        ]
        for life in range(8)
    ]


def test_noise_and_the_warm_up_of_each_life_are_no_growth() -> None:
    lives = lives_of(warm_up=0.5)
    assert not growth_in_lives(lives).exceeds(1.0)
    assert not growth_over_lives(lives).exceeds(1.0)


def test_a_leak_grows_in_lives_and_what_a_resume_reads_over_them() -> None:
    leak, resumed = lives_of(in_life=40.0), lives_of(with_run=10.0)
    assert growth_in_lives(leak).slope == pytest.approx(40, abs=8)
    assert growth_in_lives(leak).exceeds(2.0)
    assert not growth_over_lives(leak).exceeds(1.0)
    assert growth_over_lives(resumed).slope == pytest.approx(10, abs=1)
    assert growth_over_lives(resumed).exceeds(2.0)
