"""The number of generators follows the trainer's speed, and then stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from areal_flow.flow.diagnosis import SETTLING_STEPS, WINDOW_STEPS, Balance
from areal_flow.log.ledger_row import OBSERVED


def row(demand: float, number: int, noise: float = 1.0) -> dict[str, Any]:
    """Return a step of one second of training, whose batch takes `demand` seconds to generate."""
    generate_s = demand * noise
    step_s = max(1.0, generate_s / number)
    return {
        "step_s": step_s,
        "wait_s": step_s - 1.0,
        "generate_s": generate_s,
        "metrics": {OBSERVED: number * step_s},
    }


def numbers(
    demand: float, start: int, *, bounds: tuple[int, int] = (1, 16), noise: float = 0.0
) -> list[int]:
    """Return the number of generators step by step if each change is made immediately."""
    balance, number, sequence = Balance(*bounds), start, []
    random = np.random.default_rng(0)
    for _ in range(300):
        step = row(demand, number, float(random.uniform(1 - noise, 1 + noise)))
        if rows := balance.window(step, number=number):
            number = balance.target_number(rows, number=number)
        sequence.append(number)
    return sequence


@pytest.mark.parametrize(
    ("demand", "settled"), [(0.3, 1), (1.0, 1), (1.2, 1), (1.4, 2), (3.3, 4), (7.9, 8), (15.5, 16)]
)
@pytest.mark.parametrize("start", [1, 4, 16])
def test_number_settles_where_neither_side_waits(demand: float, settled: int, start: int) -> None:
    assert set(numbers(demand, start)[-200:]) <= {settled, settled + 1}
    assert len(set(numbers(demand, start)[-200:])) == 1


@pytest.mark.parametrize("demand", [0.9, 1.5, 2.6, 5.4])
def test_number_stays_though_steps_vary(demand: float) -> None:
    history = numbers(demand, 1, noise=0.15)[-200:]
    assert len(set(history)) == 1
    assert history[-1] - demand < 1.5


def test_number_of_generators_stays_within_its_bounds() -> None:
    assert set(numbers(12.0, 2, bounds=(2, 3))[-100:]) == {3}
    assert set(numbers(0.1, 3, bounds=(2, 3))[-100:]) == {2}


def test_slow_rewards_are_no_reason_for_more_generators() -> None:
    """The trainer waits half of its time, but generators idle, too."""
    balance = Balance(1, 8)
    waiting = {
        "step_s": 2.0,
        "wait_s": 1.0,
        "generate_s": 2.0,
        "metrics": {OBSERVED: 4.0},
    }
    assert balance.target_number([waiting] * WINDOW_STEPS, number=2) == 2


def test_nothing_is_decided_from_steps_before_the_last_change() -> None:
    balance = Balance(1, 8)
    for _ in range(WINDOW_STEPS + SETTLING_STEPS - 1):
        assert not balance.window(row(4.0, 1), number=1)
    assert not balance.window(row(4.0, 2), number=2)
