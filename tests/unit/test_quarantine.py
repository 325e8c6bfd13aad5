"""Three early deaths in a row quarantine a worker; nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_flow.cluster.placement import WorkerPlacement
from areal_flow.cluster.registry import (
    EARLY_S,
    NUM_EARLY_DEATHS,
    WorkerRecord,
    WorkerRegistry,
    advice,
)

LIVES = st.lists(st.floats(0, 30), max_size=12)


def after(lives: Sequence[float]) -> WorkerRecord:
    """Return a generator with these lifetimes."""
    record = WorkerRecord(WorkerPlacement("generator-1", "generator", 4))
    for life in lives:
        record.joined_at = 100.0
        record.died("killed by signal 9", now=100.0 + life)
    return record


@given(LIVES)
def test_rule_condemns_exactly_when_the_last_run_of_early_deaths_is_long_enough(
    lives: list[float],
) -> None:
    record = after(lives)
    lived = [death.lived_s < EARLY_S for death in record.deaths]
    runs = [(early, len(list(run))) for early, run in groupby(lived)]
    expected = bool(runs) and runs[-1][0] and runs[-1][1] >= NUM_EARLY_DEATHS
    assert record.is_quarantined == expected
    assert len(record.deaths) == len(lives)


@given(LIVES)
def test_one_long_life_forgives_everything_before_it(lives: list[float]) -> None:
    assert not after([*lives, 15.0]).is_quarantined
    assert not after([*lives, 15.0, 0.0, 0.0]).is_quarantined
    assert after([*lives, 15.0, 0.0, 0.0, 14.9]).is_quarantined


def test_process_that_never_joined_has_not_lived_and_after_three_none_is_expected() -> None:
    registry = WorkerRegistry()
    record = registry.place(WorkerPlacement("reward-0", "reward", 1))
    for expected in (False, False, True):
        assert registry.named("reward-0") is record
        record.died("exit status 1", now=1e6)
        assert record.is_quarantined == expected
        assert (registry.expected("reward") == []) == expected
    assert {death.lived_s for death in record.deaths} == {0.0}
    assert registry.named("reward-0") is None


def test_message_names_worker_role_lives_cause_and_remedy() -> None:
    message = after([99.0, 0.0, 0.5, 2.25]).why_quarantined()
    assert "generator-1 is quarantined" in message
    assert "this generator died 3 times in a row" in message
    assert "0.0, 0.5, 2.2 s after it joined (killed by signal 9)" in message
    assert "memory" in message


@pytest.mark.parametrize(
    ("worker", "cause", "blamed"),
    [
        ("reward worker", "silent for 12 s", "hangs"),
        ("reward worker", "exit status 3", "as os._exit does"),
        ("reward worker", "killed by signal 11", "crashes in native code"),
        ("reward worker", "killed by signal 9", "memory"),
        ("generator", "exit status 3", "memory"),
    ],
)
def test_verifier_is_blamed_for_its_own_crashes_and_not_memory(
    worker: str, cause: str, blamed: str
) -> None:
    text = advice(worker, cause)
    assert blamed in text
    assert ("memory" in text) == (blamed == "memory")
    assert ("verifier" in text) != (blamed == "memory")
