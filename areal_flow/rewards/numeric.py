"""A final answer, compared as a number or as text: arithmetic, GSM8K, short answers."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

from areal_flow.rewards.math import text as math_text
from areal_flow.rewards.math.text import BOX, MARK, marked_answer, marked_text, tidied
from areal_flow.rewards.protocol import reads_completion
from areal_flow.types import Score, answer_text

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
_NUMBER = re.compile(rf"-?{_DECIMAL}(?:/\d+)?", re.ASCII)
_FRACTION = re.compile(
    rf"(-?)({_DECIMAL})? ?\\frac *\{{ *(-?{_DECIMAL}) *\}} *\{{ *(-?{_DECIMAL}) *\}}", re.ASCII
)
"""Sign, whole part of a mixed number, numerator and denominator."""
_LAST_NUMBER = re.compile(f"{_FRACTION.pattern}|{_NUMBER.pattern}", re.ASCII)
_IN_TERM = re.compile(
    r"(?:[A-Za-z\d)\]}][\^_] *\{? *|\\(?:frac|sqrt)\b[^{}]*(?:\{[^{}]*\})?\{? *)$"
)
"""What stands before a number that is a part of a longer term, such as `x^{2}`."""
_SPACE = re.compile(r" *([-/]) *|(?<=\d) (?=\d{3}(?!\d))")
_MAX_DIGITS = 400
_TERM_CHARS = 40
_TAIL_CHARS = 500
"""Where the last number is looked for first."""


@reads_completion
def verify_numeric(*, prompt: str, completion: str, answer: Any) -> Score:
    """Compare the last `\\boxed{}`, else what follows the last `####`, else the last number.

    Both are compared as exact fractions. The answer may be a number, or a text that ends in one.
    Boxes with no more than a comma, `and` or `or` between them are one answer, which is no number.
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

    Runs of white space count as one space. An answer that is no text is compared as JSON.
    """
    right = answer_text(answer)
    found = " ".join((marked_text(completion) or completion).split())
    expected = " ".join((marked_text(right) or right).split())
    return _compared(found == expected, found)


def _compared(is_right: bool, found: str) -> Score:
    return Score(float(is_right), "right" if is_right else "wrong", extracted=found[:80])


def number_of(answer: Any) -> Fraction | None:
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return Fraction(str(answer)) if math.isfinite(answer) else None
    return parse_number(final_answer(answer) or "") if isinstance(answer, str) else None


def final_answer(text: str) -> str | None:
    """Return the marked answer, else the last number, with the LaTeX term that it is part of.

    None without a number, or if the mark is empty.
    """
    if (marked := marked_answer(text)) is not None or MARK in text or BOX in text:
        return marked
    tail = text[-_TAIL_CHARS:]
    found = _last_number(tail)
    is_cut = len(text) > len(tail) and (found is None or tail.startswith(found))
    return _last_number(text) if is_cut else found


def _last_number(text: str) -> str | None:
    text = tidied(text) if "\\" in text else text
    if not (numbers := [*_LAST_NUMBER.finditer(text)]):
        return None
    last = numbers[-1]
    term = _IN_TERM.search(text, max(0, last.start() - _TERM_CHARS), last.start())
    return text[term.start() if term else last.start() : last.end()]


def parse_number(text: str) -> Fraction | None:
    r"""Return an exact number, or None.

    Accepts `1,234`, `-2.50`, `$3`, `3/4`, `\frac{3}{4}`, `2\frac{1}{2}`, `18%`, `18.`.
    """
    if len(text) > _MAX_DIGITS:
        return None
    cleaned = _without_signs(text)
    if not _NUMBER.fullmatch(cleaned):
        cleaned = _without_signs(tidied(text))
    try:
        if _NUMBER.fullmatch(cleaned):
            return Fraction(cleaned.replace(",", ""))
        if fraction := _FRACTION.fullmatch(cleaned):
            return _mixed_number(*(part and part.replace(",", "") for part in fraction.groups()))
    except (ValueError, ZeroDivisionError):
        return None
    return None


def _mixed_number(sign: str, whole: str | None, numerator: str, denominator: str) -> Fraction:
    if whole and not (whole + numerator + denominator).isdigit():
        raise ValueError(f"expected a mixed number, found {whole} {numerator}/{denominator}")
    size = Fraction(whole or 0) + Fraction(numerator) / Fraction(denominator)
    return -size if sign else size


def _without_signs(text: str) -> str:
    return _SPACE.sub(r"\1", text.strip().strip("$").rstrip(".%"))


for _verify in (verify_numeric, verify_exact):
    vars(_verify)["made_of"] = (Path(math_text.__file__),)
