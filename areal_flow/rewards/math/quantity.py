"""Reads numbers exactly: with thousands separators, fractions, percent and units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import takewhile
from typing import NamedTuple

_INTEGER = r"\d{1,3}(?:[, ]\d{3})+|\d+"
_DECIMAL = rf"(?:{_INTEGER})(?:\.\d*)?|\.\d+"
_PLAIN = rf"(?:{_DECIMAL})(?:[eE][-+]?\d{{1,3}})?"
_SIGNED = rf"[-+]?\s?(?:{_PLAIN})"
_VALUE = (
    rf"(?:(?P<whole>{_INTEGER})\s?\\frac{{(?P<p>\d+)}}{{(?P<q>\d+)}}"
    rf"|(?P<whole_>\d+) (?P<p_>\d+)\s?/\s?(?P<q_>\d+)"
    rf"|\\frac{{\s?(?P<top>{_SIGNED})\s?}}{{\s?(?P<bottom>{_SIGNED})\s?}}"
    rf"|(?P<over>{_PLAIN})\s?/\s?(?P<under>{_PLAIN})"
    rf"|(?P<plain>{_PLAIN}))(?:\s?(?P<percent>%))?"
)
_QUANTITY = re.compile(
    rf"(?P<sign>[-+]?)\s?{_VALUE}(?P<unit>[a-zA-Z /]*)(?:\^(?P<power>[23]))?", re.ASCII
)
_IN_PROSE = re.compile(
    rf"(?P<sign>(?<!\w)[-+]|)(?<![\w.]){_VALUE}(?:(?:st|nd|rd|th)\b)?(?![\d_^])", re.ASCII
)
"""A sign belongs to the number that it touches; otherwise it is a dash."""
_PROSE = re.compile(r"(?:[^\W\d_]|[\s.,:;!?'\"’‘“”…&()—-]|(?<=[a-zA-Z])/(?=[a-zA-Z]))*")
_DENIAL = re.compile(r"\bnot?\b|n['’]t\b|\b(?:neither|never|cannot)\b", re.I)
_PART = (
    r"(?:hal(?:f|ves)|quarter|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth"
    r"|(?:hundred|thousand)th)s?)"
)
_CHANGED = re.compile(
    rf"\b(?:{_PART}|twice|double|triple|quadruple|times|square|cube|root|power|factors?"
    r"|multiples?|inverse|divisors?|reciprocal|opposite|factorial|logarithm|log|ln|plus|than"
    r"|(?:any(?:thing)?|everything|all)\s+but|except|excluding|besides|instead|under|over|above"
    r"|below|beyond|nearly|almost|(?:divided|multiplied)\s+by)\s+(?:of\s+)?(?:the\s+)?$",
    re.I,
)
_CHANGES = re.compile(
    rf"\s*\b(?:squared|cubed|factorial|minus|plus|divided|multiplied|not|{_PART}(?<!quarter)"
    rf"|and\s+an?\s+{_PART}|to\s+the\s+(?:\w+\s+)?power"
    r"|(?:is|was)\s+(?:wrong|incorrect|false|impossible))\b",
    re.I,
)
"""Words before and after a number that change its value."""
_MINUS = re.compile(r"\b(?:minus|negative)\s+$", re.I)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000} | {
    f"{name}illion": 1000**power for power, name in enumerate(("m", "b", "tr", "quadr"), 2)
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_PER = re.compile(r"\s*(?:/|\b(?:per|an?|each|every)\b)\s*")
_UNITS: Mapping[str, Mapping[str, str]] = {
    "m": {"mm millimeter millimetre": "0.001", "cm centimeter centimetre": "0.01",
          "m meter metre": "1", "km kilometer kilometre": "1000", "in inch inche": "0.0254",
          "ft foot feet": "0.3048", "yd yard": "0.9144", "mi mile": "1609.344"},
    "g": {"mg milligram": "0.001", "g gram": "1", "kg kilogram": "1000", "tonne": "1000000",
          "oz ounce": "28.349523125", "lb pound": "453.59237"},
    "l": {"ml milliliter millilitre": "0.001", "l liter litre": "1", "gallon gal": "3.785411784",
          "quart": "0.946352946", "pint": "0.473176473", "cup": "0.2365882365"},
    "spoon": {"teaspoon tsp": "1", "tablespoon tbsp": "3"},
    "s": {"ms millisecond": "0.001", "s sec second": "1", "min minute": "60", "h hr hour": "3600",
          "day": "86400", "week wk": "604800"},
    "month": {"month": "1", "year yr": "12", "decade": "120", "century centurie": "1200"},
    "cent": {"cent": "1", "dollar usd buck": "100"},
    "byte": {"byte": "1", "kb kilobyte": "1000", "mb megabyte": "1e6", "gb gigabyte": "1e9"},
    **{name: {name: "1"} for name in ("am", "pm", "euro", "yen", "degree", "radian", "acre")},
}  # fmt: skip
_MEASURES = {
    name: (kind, Fraction(size))
    for kind, sizes in _UNITS.items()
    for names, size in sizes.items()
    for name in names.split()
}
"""Dimension and size of each unit; every other word after a number is ignored."""
_SPEEDS = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h"}
_UNIT = re.compile(r"[a-zA-Z /]*")


@dataclass(frozen=True, slots=True)
class Quantity:
    value: Fraction
    is_percent: bool = False
    unit: str = ""
    """The words after the number."""
    power: int = 1
    """Power of the unit: 2 in `5 cm^2`."""


class Measure(NamedTuple):
    kind: str
    size: Fraction
    power: int


@lru_cache(4096)
def quantity_of(text: str) -> Quantity | None:
    """Return the number that a tidied answer is, or the only number in a sentence; else None.

    `5 m` is a length; `5m` and `5 x` are products. `half of 18`, `more than 18` and `not 18` are
    not 18.
    """
    match = _QUANTITY.fullmatch(text)
    if match and (_is_unit(match["unit"]) if match["unit"].split() else not match["power"]):
        return _quantity(match, match["unit"])
    return _only_number(text)


def same_quantity(quantity: Quantity, expected: Quantity) -> bool:
    """Return whether two quantities are equal: exactly, and in their units if both are known.

    `18%` equals 18, and 0.18.
    """
    if len(expected.unit) == 1 and not quantity.unit:
        return False  # it may be a factor
    value = quantity.value
    for left, right in zip(_measures(quantity), _measures(expected), strict=False):
        if left.kind != right.kind or left.power != right.power:
            return False
        value *= (left.size / right.size) ** left.power
    if quantity.is_percent == expected.is_percent:
        return value == expected.value
    percent, plain = (quantity, expected) if quantity.is_percent else (expected, quantity)
    return plain.value in {percent.value, percent.value / 100}


def words_of(text: str) -> list[str]:
    """Return the words in a tidied answer, without names of functions."""
    bare = re.sub(r"\\begin\s*\{\w+\}(?:\{[clr|]*\})?|\\end\s*\{\w+\}|\\[a-zA-Z]+", " ", text)
    return [word for word in _WORD.findall(bare) if word.lower() not in _FUNCTIONS]


_WORD = re.compile(r"[^\W\d_]{3,}|\b(?:so|it|is|we|he)\b", re.I)
_FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "arcsin", "arccos",
              "arctan", "gcd", "lcm", "max", "min", "mod", "det", "inf", "infinity"}  # fmt: skip
_ARGUMENT = re.compile(r"^\w| [b-z]\b", re.I)
"""Distinguishes the products `5sec` and `5 sec x` from the time `5 sec`."""


def _is_unit(behind: str) -> bool:
    """Return whether the text after a number is its unit."""
    first, *_ = words = behind.lower().split()
    is_apart = behind.startswith(" ") and len(first) > 2
    is_known = bool(_measure([first], 1)) and (behind.startswith(" ") or len(first) > 1)
    is_apart &= all(len(part) > 2 or part in _MEASURES for part in first.split("/"))
    is_measure = is_known and not _ARGUMENT.search(behind)
    is_unit = (is_known or is_apart) and not _FUNCTIONS.intersection(words[is_measure:])
    return is_unit and not _CHANGES.match(behind)


def _only_number(text: str) -> Quantity | None:
    matches = [*_IN_PROSE.finditer(text)]
    if len(matches) != 1 or not words_of(text) or _DENIAL.search(text):
        return None
    before, behind = text[: matches[0].start()], text[matches[0].end() :]
    is_factor = behind[:1].isalpha() and not _is_unit(behind)
    if is_factor or "(" in before or not _PROSE.fullmatch(f"{before} {behind}"):
        return None
    if _CHANGED.search(before) or _CHANGES.match(behind):
        return None
    quantity = _quantity(matches[0], _UNIT.findall(behind)[0])
    if quantity and _MINUS.search(before):
        return replace(quantity, value=-quantity.value)
    return quantity


def _quantity(match: re.Match[str], behind: str) -> Quantity | None:
    parts = {name.rstrip("_"): part for name, part in match.groupdict().items() if part}
    try:
        value = _value(parts)
    except ZeroDivisionError:
        return None
    words = behind.lower().split()
    while words and words[0] in _SCALES:
        value *= _SCALES[words.pop(0)]
    if parts.get("sign") == "-":
        value = -value
    return Quantity(value, "percent" in parts, " ".join(words), int(parts.get("power", 1)))


def _value(parts: dict[str, str]) -> Fraction:
    if "whole" in parts:
        return _number(parts["whole"]) + Fraction(int(parts["p"]), int(parts["q"]))
    if "top" in parts:
        return _number(parts["top"]) / _number(parts["bottom"])
    if "over" in parts:
        return _number(parts["over"]) / _number(parts["under"])
    return _number(parts["plain"])


def _number(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", ""))


def _measures(quantity: Quantity) -> list[Measure]:
    """Return the measures of a known unit: a length in `5 cm`, a length and a time in `5 km/h`."""
    unit = _SPEEDS.get(quantity.unit, quantity.unit)
    top, *rest = _PER.split(unit, maxsplit=1) if unit else [""]
    words, power = top.split(), quantity.power
    if len(words) > 1 and words[0] in _POWERS:
        power = _POWERS[words.pop(0)]
    measures = [_measure(words, power), *(_measure(below.split(), -1) for below in rest)]
    return [measure for measure in takewhile(bool, measures) if measure]


def _measure(words: list[str], power: int) -> Measure | None:
    if not words or (words[0] == "in" and len(words) > 1):  # such as `18 in all`
        return None
    measure = _MEASURES.get(words[0]) or _MEASURES.get(words[0].removesuffix("s"))
    return Measure(*measure, power) if measure else None
