"""Comparison of answers: plain data from hostile programs."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from areal_flow.rewards.code.reward import grade, same_output
from areal_flow.rewards.code.rows import CodeTask
from areal_flow.sandboxes.inside import kernel, plain, seccomp
from areal_flow.sandboxes.run import Outcome


def no_reference(*_: Any) -> Any:
    raise AssertionError("nothing here is a reference")


def sent(value: Any) -> Any:
    return plain.parse(json.dumps(plain.encode(value, no_reference)))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -(2**70), 1.5, "text", "\ud800", b"\xff", [1, [2]], (1, "a"), {1, 2},
        frozenset({3}), {"a": [1], 2: None, (1, 2): "b"}, complex(1, -2), float("inf"),
    ],
)  # fmt: skip
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    decoded = plain.decode(sent(value), no_reference)
    assert decoded == value
    assert type(decoded) is type(value)


def test_values_of_subclasses_arrive_as_built_in_ones() -> None:
    class Number(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    decoded = plain.decode(sent([Number(3)]), no_reference)
    assert type(decoded[0]) is int
    assert plain.canonical(sent(Number(3))) != plain.canonical(sent(4))


@pytest.mark.parametrize(
    ("left", "right", "are_same"),
    [
        ({1, 2}, {2, 1}, True), ((1, 2), [1, 2], True), (2, 2.0, True), (1, True, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True), ("1", 1, False), (None, "None", False),
        (2**60, 2**60 + 1, False), ([1, 2], {1, 2}, False), ({"k": "True"}, True, False),
    ],
)  # fmt: skip
def test_answers_are_the_same_by_value_and_kind(left: Any, right: Any, are_same: bool) -> None:
    assert (plain.canonical(sent(left)) == plain.canonical(sent(right))) is are_same


@pytest.mark.parametrize("line", ["", "NaN", "[" * 100_000, "9" * 10_000, "{", b"\xff"])
def test_lines_that_are_no_data_are_refused(line: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever JSON says of it
        plain.parse(line)


@pytest.mark.parametrize(
    ("output", "expected", "are_same"),
    [
        ("3\n", "3", True), ("3.0 ", "3", True), ("1  2\n\n", "1 2", True), ("1\n2", "1 2", False),
        ("\uff13", "3", False), ("nan", "nan", True), ("0x3", "3", False), ("3", "3 3", False),
        ("1e3", "1000", False), ("", "3", False),
    ],
)  # fmt: skip
def test_printed_answers_are_compared_by_line_and_number(
    output: str, expected: str, are_same: bool
) -> None:
    assert same_output(output, expected) is are_same


class Answering:
    """A pool whose program answers one more call each time, then ends as given."""

    modes, tier = ("call",), "none"

    def __init__(self, timed_out: Literal["cpu", "wall"]) -> None:
        self.timed_out, self.num_runs = timed_out, 0

    def run(self, programs: Any) -> list[Outcome]:
        self.num_runs += 1
        answer = json.dumps({"value": plain.encode(1, no_reference)}).encode()
        return [Outcome(timed_out=self.timed_out, answer=b"\n" + answer + b"\n")]


@pytest.mark.parametrize(("timed_out", "num_runs"), [("cpu", 5), ("wall", 1)])
def test_calls_go_on_in_another_process_only_where_they_computed(
    timed_out: Literal["cpu", "wall"], num_runs: int
) -> None:
    pool: Any = Answering(timed_out)
    task = CodeTask("", "call", [((), 1)] * 5, entry_point="f")
    assert grade(pool, task).verdict == "timeout"
    assert pool.num_runs == num_runs


@pytest.mark.skipif(kernel.MACHINE not in kernel.MACHINES, reason="no numbers for this machine")
def test_filter_is_a_whole_number_of_instructions_and_fits_the_kernel() -> None:
    program = seccomp.with_own_pid(seccomp.filter_program(), 1)
    assert len(program) % 8 == 0
    assert len(program) // 8 <= 4096
