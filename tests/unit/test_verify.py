"""`areal-flow verify`: one verdict a line, in order, whatever the line."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pipelines.jobs.verify import read_lines, verify_lines


def judged(kind: str, *rows: Any) -> list[dict[str, Any]]:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return [*verify_lines(kind, lines)]


SAYS = {
    "numeric math": {
        "The answer is −5": {"5": "incorrect", "-5": "correct", "−5": "correct"},
        "so x = 1e3": {"3": "incorrect", "1000": "correct"},
        "#### 5 apples": {"5": "correct", "6": "incorrect"},
        r"\boxed{5 \text{ apples}}": {"5": "correct"},
        r"\boxed{{42}}": {"42": "correct", "2": "incorrect"},
        "<think>3+4 = 7": {"7": "parse_error"},
        r"<think>\boxed{7}": {"7": "parse_error"},
        "3 + 4 = 7": {"7": "correct", "4": "incorrect"},
        "half of 18": {"18": "incorrect"},
        "The answer is minus 18": {"18": "incorrect", "-18": "correct"},
        "anything but 18": {"18": "incorrect"},
        "The answer is not 18": {"18": "incorrect"},
        "more than 18": {"18": "incorrect"},
        "#### 18 squared": {"18": "incorrect"},
        "18 million": {"18": "incorrect", "18000000": "correct"},
        "They raised 1.5 million dollars.": {"1500000": "correct", "1.5": "incorrect"},
        "#### 3 weeks": {"3 days": "incorrect", "21 days": "correct", "3": "correct"},
        "It takes 90 minutes.": {"1.5 hours": "correct", "90 seconds": "incorrect"},
        "60 miles per hour": {"60 mph": "correct", "60 km/h": "incorrect"},
        "18 cents": {"18 dollars": "incorrect", "18": "correct"},
        "#### 5 min": {
            "5": "correct",
            "5 minutes": "correct",
            "300 sec": "correct",
            "5 hours": "incorrect",
        },
        "30 seconds": {"30 sec": "correct", "0.5 min": "correct", "30 min": "incorrect"},
        "The answer is 17!": {"17": "correct"},
        "Answer: **17!**": {"17": "correct"},
        "So it is\n17!": {"17": "correct", "18": "incorrect"},
        "In all:\n- 17 apples": {"17": "correct", "-17": "incorrect"},
        "In all:\n* 17": {"17": "correct"},
        "In all:\n  • **17**": {"17": "correct"},
        "In all:\n-17": {"-17": "correct", "17": "incorrect"},
        "Answer: - 17": {"-17": "correct"},
        "17": {"- 17": "incorrect"},
        "She makes **18** dollars a day": {"18": "correct", "18 dollars per week": "incorrect"},
    },
    "math": {
        r"\boxed{\frac{1}{2^{99}}}": {r"\frac{1}{2^{98}}": "incorrect", r"2^{-99}": "correct"},
        r"\boxed{e^{-40}}": {"e^{-41}": "incorrect", r"\frac{1}{e^{40}}": "correct"},
        r"\boxed{0.0000000000001}": {r"10^{-14}": "incorrect"},
        r"\boxed{x+e^{-40}}": {"x+e^{-41}": "incorrect"},
        r"\boxed{\pi+e^{-900}}": {r"\pi": "incorrect"},
        r"\boxed{[0,e^{-40}]}": {"[0,e^{-41}]": "incorrect"},
        r"\boxed{0.1\sqrt2+0.2\sqrt2}": {r"0.3\sqrt2": "correct"},
        r"\boxed{5!}": {"120": "correct", "5": "incorrect"},
        "#### 5!": {"120": "correct", "5": "incorrect"},
        "5": {r"5 \sec x": "incorrect", "5 sec x": "incorrect"},
        r"\boxed{1.41421356237310}": {r"\sqrt{2}": "correct", r"\sqrt{3}": "incorrect"},
    },
}


@pytest.mark.parametrize("kinds", SAYS)
def test_answers_are_judged_by_what_they_say(kinds: str) -> None:
    expected = [
        (completion, reference, verdict)
        for completion, verdicts in SAYS[kinds].items()
        for reference, verdict in verdicts.items()
    ]
    rows = [{"completion": given, "reference": reference} for given, reference, _ in expected]
    for kind in kinds.split():
        verdicts = [row["verdict"] for row in judged(kind, *rows)]
        results = [(*case[:2], v) for case, v in zip(expected, verdicts, strict=True)]
        assert results == expected, kind


def fails_on_three(*, completion: str) -> float:
    if completion == "3":
        raise ValueError("three")
    return float(completion)


def test_verdicts_come_in_the_order_of_the_rows_and_none_is_lost() -> None:
    rows = [{"id": n, "completion": str(n % 2), "reference": "1"} for n in range(600)]
    verdicts = judged("numeric", *rows)
    assert [verdict["id"] for verdict in verdicts] == [*range(600)]
    assert [verdict["score"] for verdict in verdicts] == [float(n % 2) for n in range(600)]


@pytest.mark.parametrize(
    "line", ["", "no json", "[1]", '{"id": 7}', '{"completion": 3}', "[" * 10**5]
)
def test_lines_that_are_no_rows_are_bad_references(line: str) -> None:
    (verdict,) = judged("numeric", line)
    assert (verdict["verdict"], verdict["score"]) == ("bad_reference", 0.0)
    assert "line 1" in verdict["detail"]


HUGE = "1 2 " * 25_000_000


def test_a_hundred_megabytes_cost_no_other_row_its_verdict() -> None:
    began = time.process_time()
    texts = ["7", HUGE, "7"]
    lines = "".join(json.dumps({"completion": text, "answer": "7"}) + "\n" for text in texts)
    verdicts = [*verify_lines("math", read_lines(io.StringIO(lines)))]
    assert [verdict["verdict"] for verdict in verdicts] == ["correct", "output_limit", "correct"]
    assert time.process_time() - began < 10


def test_lines_are_judged_before_others_fill_the_memory() -> None:
    taken: list[int] = []

    def lines() -> Iterator[str]:
        for number in range(3):
            taken.append(number)
            yield json.dumps({"completion": HUGE, "answer": "7"})

    assert next(verify_lines("exact", lines()))["verdict"] == "output_limit"
    assert taken == [0]


def test_text_beyond_the_limit_of_a_line_is_not_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.jobs.verify.MAX_LINE_CHARS", 5)
    assert [*read_lines(io.StringIO("12345678\n1\n12345\n\n123456"))] == [
        "12345", "1\n", "12345", "\n", "12345"
    ]  # fmt: skip


def test_own_verifier_that_raises_fails_on_its_row_only() -> None:
    rows = [{"id": n, "completion": str(n)} for n in (1, 3, 0)]
    verdicts = judged("tests.unit.test_verify:fails_on_three", *rows)
    assert [verdict["verdict"] for verdict in verdicts] == ["correct", "error", "incorrect"]
    assert verdicts[1]["score"] is None
    assert "three" in verdicts[1]["detail"]
