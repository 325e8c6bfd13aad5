"""Numbers as answers write them: exact, with thousands separators, fractions, percent and units."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

_INTEGER = r"\d{1,3}(?:[, ]\d{3})+|\d+"
_DECIMAL = rf"(?:{_INTEGER})(?:\.\d*)?|\.\d+"
_PLAIN = rf"(?:{_DECIMAL})(?:[eE][-+]?\d{{1,3}})?"
_SIGNED = rf"[-+]?\s?(?:{_PLAIN})"
_QUANTITY = re.compile(
    rf"(?P<sign>[-+]?)\s?"
    rf"(?:(?P<whole>\d+)\s?\\frac{{(?P<p>\d+)}}{{(?P<q>\d+)}}"
    rf"|(?P<whole_>\d+) (?P<p_>\d+)\s?/\s?(?P<q_>\d+)"
    rf"|\\frac{{\s?(?P<top>{_SIGNED})\s?}}{{\s?(?P<bottom>{_SIGNED})\s?}}"
    rf"|(?P<over>{_PLAIN})\s?/\s?(?P<under>{_PLAIN})"
    rf"|(?P<plain>{_PLAIN}))"
    r"(?:\s?(?P<percent>%))?(?P<unit>[a-zA-Z /]*)(?:\^(?P<power>[23]))?",
    re.ASCII,
)
_NUMBER = re.compile(rf"[-+]?(?:{_PLAIN})(?:\s?/\s?\d+)?\s?%?", re.ASCII)
_PROSE = re.compile(r"[a-zA-Z\s.,:;!?'\"-]*")
_DENIAL = re.compile(r"\bnot?\b|n't\b|\bneither\b|\bnever\b", re.I)
_MEASURES = {
    **dict.fromkeys(("mm", "millimeter", "millimetre"), ("m", Fraction(1, 1000))),
    **dict.fromkeys(("cm", "centimeter", "centimetre"), ("m", Fraction(1, 100))),
    **dict.fromkeys(("m", "meter", "metre"), ("m", Fraction(1))),
    **dict.fromkeys(("km", "kilometer", "kilometre"), ("m", Fraction(1000))),
    **dict.fromkeys(("in", "inch", "inche"), ("in", Fraction(1))),
    **dict.fromkeys(("ft", "foot", "feet"), ("in", Fraction(12))),
    **dict.fromkeys(("mg", "milligram"), ("g", Fraction(1, 1000))),
    **dict.fromkeys(("g", "gram"), ("g", Fraction(1))),
    **dict.fromkeys(("kg", "kilogram"), ("g", Fraction(1000))),
    **dict.fromkeys(("ml", "milliliter", "millilitre"), ("l", Fraction(1, 1000))),
    **dict.fromkeys(("l", "liter", "litre"), ("l", Fraction(1))),
    **dict.fromkeys(("s", "sec", "second"), ("s", Fraction(1))),
    **dict.fromkeys(("min", "minute"), ("s", Fraction(60))),
    **dict.fromkeys(("h", "hr", "hour"), ("s", Fraction(3600))),
    "am": ("am", Fraction(1)),
    "pm": ("pm", Fraction(1)),
}
"""What units of one kind are to each other; every other word after a number is left out."""


@dataclass(frozen=True, slots=True)
class Quantity:
    value: Fraction
    is_percent: bool = False
    unit: str = ""
    power: int = 1
    """Of the unit: 2 in `5 cm^2`."""


def quantity_of(text: str) -> Quantity | None:
    """Return the number that a tidied answer is, or the only one in a sentence; else None.

    `5 m` is a length; `5m` and `5 x` are products.
    """
    found = _QUANTITY.fullmatch(text)
    if found is None:
        return _only_number(text)
    behind = found["unit"].split()
    if not _is_unit(found["unit"]) if behind else found["power"]:
        return None
    parts = {name.rstrip("_"): part for name, part in found.groupdict().items() if part}
    try:
        value = _value(parts)
    except ZeroDivisionError:
        return None
    sign = -1 if parts.get("sign") == "-" else 1
    unit = behind[0].lower() if behind else ""
    return Quantity(sign * value, "percent" in parts, unit, int(parts.get("power", 1)))


def same_quantity(found: Quantity, expected: Quantity) -> bool:
    """Return whether two quantities are equal: exactly, and in their units where both are known.

    `18%` equals 18, and 0.18.
    """
    if len(expected.unit) == 1 and not found.unit:
        return False  # it may be a factor
    ours, theirs = map(_measure, (found, expected))
    if ours and theirs:
        values = [side.value * measure[1] ** side.power
                  for side, measure in ((found, ours), (expected, theirs))]  # fmt: skip
        is_same_kind = (ours[0], found.power) == (theirs[0], expected.power)
        return is_same_kind and values[0] == values[1]
    if found.is_percent == expected.is_percent:
        return found.value == expected.value
    percent, plain = (found, expected) if found.is_percent else (expected, found)
    return plain.value in {percent.value, percent.value / 100}


def words_of(text: str) -> list[str]:
    """Return the words in a tidied answer that are no names of functions."""
    bare = re.sub(r"\\begin\s*\{\w+\}(?:\{[clr|]*\})?|\\end\s*\{\w+\}|\\[a-zA-Z]+", " ", text)
    return [word for word in re.findall(r"[^\W\d_]{3,}", bare) if word.lower() not in _FUNCTIONS]


_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "arcsin", "arccos",
              "arctan", "gcd", "lcm", "max", "min", "mod", "det", "inf", "infinity"}  # fmt: skip


def _is_unit(behind: str) -> bool:
    """Return whether what follows a number does not change it."""
    first, *_ = words = behind.lower().split()
    is_apart = behind.startswith(" ") and len(first) > 2
    is_known = first in _MEASURES and (behind.startswith(" ") or len(first) > 1)
    is_apart &= all(len(part) > 2 or part in _MEASURES for part in first.split("/"))
    return (is_known or is_apart) and not _FUNCTIONS.intersection(words)


def _only_number(text: str) -> Quantity | None:
    numbers = [*_NUMBER.finditer(text)]
    if len(numbers) != 1 or not words_of(text) or _DENIAL.search(text):
        return None
    number = numbers[0]
    before, after = text[: number.start()], text[number.end() :]
    if not _PROSE.fullmatch(before + after):
        return None
    found = quantity_of(number[0].strip())
    unit = (after.split() or [""])[0].strip(",.;:!?").lower()
    return replace(found, unit=unit if unit in _MEASURES else "") if found else None


def _value(parts: dict[str, str]) -> Fraction:
    if "whole" in parts:
        return Fraction(parts["whole"]) + Fraction(int(parts["p"]), int(parts["q"]))
    if "top" in parts:
        return _number(parts["top"]) / _number(parts["bottom"])
    if "over" in parts:
        return _number(parts["over"]) / _number(parts["under"])
    return _number(parts["plain"])


def _number(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", ""))


def _measure(quantity: Quantity) -> tuple[str, Fraction] | None:
    return _MEASURES.get(quantity.unit) or _MEASURES.get(quantity.unit.removesuffix("s"))
