"""Three early deaths in a row condemn a worker; nothing else does."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_flow.cluster.death_advice import advice
from areal_flow.cluster.placement import WorkerPlacement
from areal_flow.cluster.registry import Death, QuarantineRule, WorkerRecord, WorkerRegistry

LIVES = st.lists(st.floats(0, 100), max_size=12)


@given(LIVES, st.integers(1, 4), st.floats(1, 50))
def test_rule_condemns_exactly_when_the_last_run_of_early_deaths_is_long_enough(
    lives: list[float], num_deaths: int, early_s: float
) -> None:
    rule = QuarantineRule(num_deaths=num_deaths, early_s=early_s)
    runs = [(early, len(list(run))) for early, run in groupby(life < early_s for life in lives)]
    expected = bool(runs) and runs[-1][0] and runs[-1][1] >= num_deaths
    assert rule.condemns([Death(life, "") for life in lives]) == expected


@given(LIVES)
def test_one_long_life_forgives_everything_before_it(lives: list[float]) -> None:
    deaths = [Death(life, "") for life in [*lives, 15.0]]
    assert not QuarantineRule().condemns(deaths)
    assert not QuarantineRule().condemns([*deaths, Death(0.0, ""), Death(0.0, "")])


@given(LIVES)
def test_member_is_quarantined_at_the_first_death_that_condemns_it(lives: list[float]) -> None:
    registry = WorkerRegistry()
    registry.place(WorkerPlacement("generator-0", "generator", 4))
    record = registry.named("generator-0")
    assert record is not None
    now = 100.0
    for count, life in enumerate(lives, 1):
        newcomer = WorkerRecord("generator-0", "generator", 4, address="tcp://a")
        registry.joined(newcomer, now=now)
        now += life
        condemned = registry.died(record, "killed by signal 9", now=now)
        assert condemned == QuarantineRule().condemns(record.deaths)
        assert len(record.deaths) == count
        if condemned:
            break
    assert record.is_quarantined == QuarantineRule().condemns(record.deaths)
    assert (registry.expected("generator") == []) == record.is_quarantined


def test_process_that_never_joined_has_not_lived() -> None:
    registry = WorkerRegistry()
    registry.place(WorkerPlacement("reward-0", "reward", 1))
    (record,) = registry.all()
    assert [registry.died(record, "exit status 1", now=1e6) for _ in range(3)] == [
        False,
        False,
        True,
    ]
    assert {death.lived_s for death in record.deaths} == {0.0}


def from_elsewhere(address: str) -> WorkerRecord:
    return WorkerRecord(address, "generator", 4, address=address, nanny="tcp://its-nanny")


def test_worker_from_elsewhere_is_expected_only_while_it_is_there() -> None:
    registry = WorkerRegistry()
    newcomer = from_elsewhere("tcp://b")
    assert registry.joined(newcomer, now=1.0) is newcomer
    assert registry.present("generator") == registry.expected("generator") == [newcomer]
    registry.left(newcomer)
    assert registry.expected("generator") == []
    assert registry.joined(from_elsewhere("tcp://c"), now=2.0) is newcomer
    assert [record.address for record in registry.present("generator")] == ["tcp://c"]


def test_message_names_worker_role_lives_cause_and_remedy() -> None:
    lives = [Death(99.0, ""), Death(0.0, "exit status 1"), Death(0.5, "")]
    deaths = [*lives, Death(2.25, "killed by signal 9")]
    message = QuarantineRule().describe("generator-1", "generator", deaths)
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
def test_verifier_and_not_the_memory_is_blamed_for_what_a_verifier_does(
    worker: str, cause: str, blamed: str
) -> None:
    said = advice(worker, cause)
    assert blamed in said
    assert ("memory" in said) == (blamed == "memory")
    assert ("verifier" in said) != (blamed == "memory")
