"""A final answer, compared as a number or as text: arithmetic, GSM8K, short answers."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

from areal_flow.rewards import math_text
from areal_flow.rewards.math_text import BOX, MARK, marked_answer, tidied
from areal_flow.rewards.protocol import reads_completion
from areal_flow.types import Score, answer_text

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?", re.ASCII)
_FRACTION = re.compile(r"(-?)\\[dtc]?frac\{(-?\d+)\}\{(\d+)\}", re.ASCII)
_LAST_NUMBER = re.compile(f"{_FRACTION.pattern}|{_NUMBER.pattern}", re.ASCII)
_SPACE = re.compile(r" *([-/]) *|(?<=\d) (?=\d{3}(?!\d))")
_MAX_DIGITS = 400
_TAIL_CHARS = 500
"""Where the last number is looked for first."""


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
    """Return the marked answer, else the last number; None without one, or if the mark is empty.

    A number within a longer term of LaTeX, such as `x^{2}`, is returned with what stands before it.
    """
    if (marked := marked_answer(text)) is not None or MARK in text or BOX in text:
        return marked
    tail = max(0, len(text) - _TAIL_CHARS)
    numbers = [*_LAST_NUMBER.finditer(text, tail)]
    if tail and (not numbers or numbers[-1].start() == tail):
        numbers = [*_LAST_NUMBER.finditer(text)]
    if not numbers:
        return None
    last, begin = numbers[-1], numbers[-1].start()
    return text[begin - 1 : last.end()] if text[begin - 1 : begin] in (*"{^_",) else last[0]


def parse_number(text: str) -> Fraction | None:
    r"""Return an exact number, or None.

    Accepts `1,234`, `-2.50`, `$3`, `3/4`, `\frac{3}{4}`, `18%`, `18.`.
    """
    if len(text) > _MAX_DIGITS:
        return None
    cleaned = _without_signs(text)
    if not _NUMBER.fullmatch(cleaned):
        cleaned = _FRACTION.sub(r"\1\2/\3", _without_signs(tidied(text)))
    if not _NUMBER.fullmatch(cleaned):
        return None
    try:
        return Fraction(cleaned.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def _without_signs(text: str) -> str:
    """Return a number without the signs of dollars and percents, and without spaces."""
    return _SPACE.sub(r"\1", text.strip().strip("$").rstrip(".%"))


for _verify in (verify_numeric, verify_exact):
    vars(_verify)["made_of"] = (Path(math_text.__file__),)
