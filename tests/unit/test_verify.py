"""`areal-flow verify`: one verdict a line, in order, whatever the line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipelines.verify import verify_lines


def judged(kind: str, *rows: Any) -> list[dict[str, Any]]:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return [*verify_lines(kind, lines)]


def fails_on_three(*, completion: str) -> float:
    if completion == "3":
        raise ValueError("three")
    return float(completion)


def test_verdicts_come_in_the_order_of_the_rows_and_none_is_lost() -> None:
    rows = [{"id": n, "completion": str(n % 2), "reference": "1"} for n in range(600)]
    found = judged("numeric", *rows)
    assert [verdict["id"] for verdict in found] == [*range(600)]
    assert [verdict["score"] for verdict in found] == [float(n % 2) for n in range(600)]


@pytest.mark.parametrize(
    "line", ["", "no json", "[1]", '{"id": 7}', '{"completion": 3}', "[" * 10**5]
)
def test_lines_that_are_no_rows_are_bad_references(line: str) -> None:
    (found,) = judged("numeric", line)
    assert (found["verdict"], found["score"]) == ("bad_reference", 0.0)
    assert "line 1" in found["detail"]


def test_own_verifier_that_raises_fails_on_its_row_only() -> None:
    rows = [{"id": n, "completion": str(n)} for n in (1, 3, 0)]
    found = judged("tests.unit.test_verify:fails_on_three", *rows)
    assert [verdict["verdict"] for verdict in found] == ["right", "error", "wrong"]
    assert found[1]["score"] is None
    assert "three" in found[1]["detail"]
