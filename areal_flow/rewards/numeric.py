"""A final answer, compared as a number or as text: arithmetic, GSM8K, short answers."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

from areal_flow.rewards.protocol import reads_completion
from areal_flow.types import Score, answer_text

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?", re.ASCII)
_ANSWER_MARK = "####"
_MAX_DIGITS = 400


@reads_completion
def verify_numeric(*, prompt: str, completion: str, answer: Any) -> Score:
    """Compare the last `\\boxed{}`, else what follows the last `####`, else the last number.

    The answer may be a number, or a text with one, such as GSM8K's solution ending in `#### n`.
    Both are compared as exact fractions. Only ASCII digits are digits.
    """
    expected = number_of(answer)
    if expected is None:
        shown = answer_text(answer)[-40:]
        return Score(0.0, "bad_answer", error=f"no number in the answer {shown!r}")
    marked = final_answer(completion)
    if marked is None:
        return Score(0.0, "parse_error")
    found = parse_number(marked)
    if found is None:
        return Score(0.0, "parse_error", extracted=marked[:80])
    return _compared(found == expected, marked)


@reads_completion
def verify_exact(*, prompt: str, completion: str, answer: Any) -> Score:
    """Compare the marked final answer, else the whole completion, as text.

    Runs of white space count as one space; letter case counts. An answer that is no text is
    compared as JSON: `42`, `true`, `["a", "b"]`.
    """
    right = answer_text(answer)
    found = " ".join((marked_answer(completion) or completion).split())
    expected = " ".join((marked_answer(right) or right).split())
    return _compared(found == expected, found)


def _compared(is_right: bool, found: str) -> Score:
    return Score(float(is_right), "right" if is_right else "wrong", extracted=found[:80])


def number_of(answer: Any) -> Fraction | None:
    """Return the number that a right answer is, or that its text ends in; None without one."""
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return Fraction(str(answer)) if math.isfinite(answer) else None
    return parse_number(final_answer(answer) or "") if isinstance(answer, str) else None


def final_answer(text: str) -> str | None:
    """Return the marked answer, else the last number, or None when there is neither."""
    if (marked := marked_answer(text)) is not None:
        return marked
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def marked_answer(text: str) -> str | None:
    """Return what stands in the last `\\boxed{}`, else after the last `####`, or None."""
    if boxed := _BOXED.findall(text):
        return str(boxed[-1]).strip()
    if _ANSWER_MARK in text:
        return text.rsplit(_ANSWER_MARK, 1)[1].strip()
    return None


def parse_number(text: str) -> Fraction | None:
    """Return an exact number, or None; accepts `1,234`, `-2.50`, `$3`, `3/4`, `18%`, `18.`."""
    cleaned = text.strip().strip("$").rstrip(".%").replace(",", "").replace(" ", "")
    if not _NUMBER.fullmatch(cleaned) or len(cleaned) > _MAX_DIGITS:
        return None
    try:
        return Fraction(cleaned)
    except (ValueError, ZeroDivisionError):
        return None
