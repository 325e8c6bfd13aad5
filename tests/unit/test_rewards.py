"""Verifiers: what counts as right, and what happens when one fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from areal_flow.errors import RewardError
from areal_flow.rewards.loading import load_verifier
from areal_flow.rewards.numeric import verify_exact, verify_numeric
from areal_flow.rewards.scoring import score_completions
from areal_flow.types import Score


@pytest.mark.parametrize(
    ("completion", "answer", "verdict"),
    [
        (" 6 6 -1 #### -1", "-1", "right"),
        ("#### 1,234", "1234", "right"),
        ("#### $18.", "so she has 18 left\n#### 18", "right"),
        ("the answer is \\boxed{3/4}", "0.75", "right"),
        ("first 5, then #### 7", "7", "right"),
        ("no mark, just 41 and 42", "42", "right"),
        ("#### 2.50", "2.5", "right"),
        ("#### 8", "7", "wrong"),
        ("\\boxed{1} but no, \\boxed{2}", "1", "wrong"),
        ("#### 7=5", "5", "parse_error"),
        ("#### twelve", "12", "parse_error"),
        ("nothing at all", "12", "parse_error"),
        ("", "12", "parse_error"),
        ("#### 1/0", "12", "parse_error"),
        ("#### \uff11\uff12", "12", "parse_error"),
        ("\u0661\u0662", "12", "parse_error"),
        ("#### " + "9" * 5000, "12", "parse_error"),
        ("#### 1", "one", "bad_answer"),
    ],
)
def test_numeric_verdicts(completion: str, answer: str, verdict: str) -> None:
    score = verify_numeric(prompt="", completion=completion, answer=answer)
    assert score.verdict == verdict
    assert score.reward == (1.0 if verdict == "right" else 0.0)


@pytest.mark.parametrize(
    ("completion", "answer", "verdict"),
    [
        ("thinking... #### Paris", "Paris", "right"),
        ("\\boxed{x + 1}", "#### x + 1", "right"),
        ("Paris ", "Paris", "right"),
        ("paris", "Paris", "wrong"),
        ("", "Paris", "wrong"),
    ],
)
def test_exact_verdicts(completion: str, answer: str, verdict: str) -> None:
    assert verify_exact(prompt="", completion=completion, answer=answer).verdict == verdict


def test_verifier_that_raises_costs_only_its_own_completion() -> None:
    def fragile(*, prompt: str, completion: str, answer: str) -> float:
        if completion == "bad":
            raise ZeroDivisionError("on purpose")
        return float(completion == answer)

    found = score_completions(fragile, prompt="", completions=["a", "bad", "b"], answer="a")
    assert [score.reward for score in found] == [1.0, None, 0.0]
    assert found[1].verdict == "error"
    assert "ZeroDivisionError: on purpose (at fragile, line" in found[1].error


def test_reward_that_is_not_finite_is_an_error() -> None:
    def strange(*, prompt: str, completion: str, answer: str) -> float:
        return float("nan")

    (score,) = score_completions(strange, prompt="", completions=["a"], answer="a")
    assert score.reward is None
    assert "finite" in score.error


def test_verifier_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_verifier.py").write_text(
        "def starts(*, prompt, completion, answer):\n"
        "    return float(completion.startswith(answer))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = load_verifier("my_verifier:starts")
    assert loaded.verify(prompt="", completion="abc", answer="ab") == 1.0
    assert loaded.identity.startswith("my_verifier:starts@")
    del sys.modules["my_verifier"]


@pytest.mark.parametrize("name", ["nonsense", "json:nothing", "no_such_module:f", "json:__name__"])
def test_unknown_verifier_is_refused_by_name(name: str) -> None:
    with pytest.raises(RewardError, match=r"rewards\.verifier"):
        load_verifier(name)


def test_score_may_be_returned_whole() -> None:
    def detailed(*, prompt: str, completion: str, answer: str) -> Score:
        return Score(0.5, "right", extracted=completion)

    (score,) = score_completions(detailed, prompt="", completions=["x"], answer="")
    assert score == Score(0.5, "right", extracted="x")
