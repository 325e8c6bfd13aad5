"""Admission: the paper's capacities, and equivalence with its cumulative form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_flow.config.recipe import ControllerSettings
from areal_flow.flow.gate import Gate


def gate(max_running: int, batch_size: int, max_staleness: int, group_size: int = 1) -> Gate:
    settings = ControllerSettings(
        batch_size=batch_size, group_size=group_size, max_staleness=max_staleness
    )
    return Gate(settings, max_running=max_running)


def cumulative_capacity(
    concurrency: int,
    batch_size: int,
    max_staleness: int,
    version: int,
    submitted: int,
    running: int,
) -> int:
    """Eq. 3 as the paper writes it: fence((N_r - 1) / B) <= i + eta."""
    within_bound = (max_staleness + version + 1) * batch_size - submitted
    return max(0, min(concurrency - running, within_bound))


def test_reference_capacities() -> None:
    assert gate(100, 4, 2).capacity() == 12
    assert cumulative_capacity(100, 4, 2, version=0, submitted=0, running=0) == 12
    assert cumulative_capacity(1000, 4, 2, version=5, submitted=0, running=0) == 32


@given(
    st.integers(1, 6),
    st.integers(0, 4),
    st.integers(1, 60),
    st.lists(st.sampled_from(["submit", "finish", "train"]), max_size=80),
)
def test_outstanding_form_equals_cumulative_form(
    batch_size: int, max_staleness: int, concurrency: int, events: list[str]
) -> None:
    tested = gate(concurrency, batch_size, max_staleness)
    version = submitted = running = ready = 0
    for event in events:
        if event == "submit" and tested.admits_group():
            tested.submitted()
            submitted, running = submitted + 1, running + 1
        elif event == "finish" and running:
            tested.finished()
            running, ready = running - 1, ready + 1
        elif event == "train" and ready >= batch_size:
            tested.released(batch_size)
            version, ready = version + 1, ready - batch_size
        assert tested.capacity() == cumulative_capacity(
            concurrency, batch_size, max_staleness, version, submitted, running
        )


def test_gate_blocks_when_outstanding_is_full() -> None:
    tested = gate(100, 4, 1)
    for _ in range(8):
        assert tested.admits_group()
        tested.submitted()
    assert not tested.admits_group()
    for _ in range(4):
        tested.finished()
    assert not tested.admits_group()
    tested.released(4)
    assert tested.capacity() == 4


def test_groups_are_never_split() -> None:
    tested = gate(10, 8, 0, group_size=4)
    tested.submitted()
    tested.submitted()
    assert tested.capacity() == 0
    tested.finished()
    tested.released()
    assert tested.admits_group()


def test_admission_is_throttled_while_ready_work_covers_a_batch() -> None:
    tested = gate(100, 4, 8)
    assert tested.capacity(num_ready=3) == 36
    assert tested.capacity(num_ready=4) == 0


def test_fresh_gate_counts_nothing() -> None:
    tested = gate(100, 4, 1)
    assert (tested.outstanding, tested.running, tested.capacity()) == (0, 0, 8)


def test_group_fits_exactly_or_not_at_all() -> None:
    assert gate(4, 8, 0, group_size=4).admits_group()
    assert not gate(3, 8, 0, group_size=4).admits_group()
    assert gate(100, 4, 0, group_size=4).admits_group()
    assert not gate(100, 4, 0, group_size=4).admits_group(num_ready=4)
    assert gate(100, 4, 0, group_size=4).admits_group(num_ready=3)


def test_running_work_and_outstanding_work_bound_apart() -> None:
    tested = gate(6, 8, 0, group_size=2)
    tested.submitted()
    tested.submitted()
    assert (tested.running, tested.outstanding, tested.capacity()) == (4, 4, 2)
    tested.finished()
    tested.finished()
    assert (tested.running, tested.outstanding, tested.capacity()) == (0, 4, 4)
    tested.released(2)
    assert (tested.running, tested.outstanding, tested.capacity()) == (0, 0, 6)


def test_next_attempt_runs_and_was_outstanding_before() -> None:
    tested = gate(4, 8, 0, group_size=2)
    tested.submitted()
    tested.finished()
    assert (tested.running, tested.outstanding) == (0, 2)
    tested.started()
    assert (tested.running, tested.outstanding, tested.capacity()) == (2, 2, 2)


def test_restored_group_is_outstanding_and_not_running() -> None:
    tested = gate(100, 8, 0, group_size=2)
    tested.restored()
    tested.restored()
    assert (tested.running, tested.outstanding, tested.capacity()) == (0, 4, 4)


def test_fewer_generators_than_running_work_admit_nothing() -> None:
    tested = gate(8, 8, 1, group_size=2)
    for _ in range(3):
        tested.submitted()
    tested.max_running = 2
    assert tested.capacity() == 0


def test_slot_that_was_never_taken_is_not_given_back() -> None:
    tested = gate(8, 8, 1, group_size=2)
    with pytest.raises(AssertionError):
        tested.finished()
    tested = gate(8, 8, 1, group_size=2)
    tested.submitted()
    with pytest.raises(AssertionError, match="released twice"):
        tested.released()
