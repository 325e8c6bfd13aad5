r"""Compares an answer with a reference: as text, then as exact numbers, then by algebra.

Lists are compared in any order; `x = 5` is 5. Algebra is a parameter, since it runs in a process
that can be stopped.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from areal_flow.rewards.math.quantity import quantity_of, same_quantity, words_of
from areal_flow.rewards.math.text import compact

Algebra = Callable[[str, str], bool]
"""Returns whether an answer equals a reference, both tidied."""

_NAME = re.compile(
    r"(?:\\angle|\\overline)?\s*\\?[a-zA-Z][a-zA-Z ]*'?\s*(?:_(?:\w|\{[^{}]*\}))?\s*(?:\([^=]*\))?"
)
_MEMBER = re.compile(r"^\s*\\?[a-zA-Z](?:_\w)?\s*\\in(?![a-zA-Z])")
_LAST_COMMA = re.compile(r"[,;]\s*(?:and|or)\b|\b(?:and|or)\b", re.I)
_EQUATION, _BOUNDS = re.compile(r"=|\\equiv(?![a-zA-Z])"), re.compile(r"_\{[^{}]*\}")
_MISREAD = re.compile(r"(?<![\w.])[\d.]+\s+[\d.]|\d_")
"""Adjacent numbers, which algebra would add, and the base of digits, which it would drop."""
_EMPTY = {r"\emptyset", r"\varnothing", "nosolution", "nosolutions", "norealsolution",
            "norealsolutions", "none", "emptyset", "theemptyset", r"\{\}"}  # fmt: skip


def is_same(answer: str, reference: str, algebra: Algebra) -> bool:
    if same_text(answer, reference):
        return True
    expected = elements_of(reference)
    elements = elements_of(answer)
    if len(expected) != len(elements):
        expected, elements = (elements_of(text, is_list=True) for text in (reference, answer))
        if len(expected) != len(elements) or len(expected) == 1:
            return False
    if len(expected) == 1:
        return _is_same_element(elements[0], expected[0], algebra)
    for element in elements:
        matches = (each for each in expected if _is_same_element(element, each, algebra))
        if (match := next(matches, None)) is None:
            return False
        expected.remove(match)
    return True


def same_text(answer: str, reference: str) -> bool:
    left, right = compact(answer), compact(reference)
    return left == right or (left in _EMPTY and right in _EMPTY)


def algebraic_elements(reference: str) -> list[str]:
    """Return the elements of a reference that are neither numbers nor words."""
    elements = []
    for element in elements_of(reference):
        name, parts = _chain(element)
        bare = parts[-1] if name or len(parts) == 1 else element
        if not (quantity_of(bare) or _is_text(bare) or compact(bare) in _EMPTY):
            elements.append(bare)
    return elements


def value_of(text: str) -> str:
    """Return the value of a tidied text without its name: `5` of `x = 5`, `5 = x` and `= 5`."""
    _, parts = _chain(text)
    return parts[0] if len(parts) == 1 else text


def elements_of(text: str, *, is_list: bool = False) -> list[str]:
    r"""Return the answers that a tidied text lists; with `is_list`, `1,234` is two of them."""
    if text.startswith(r"\{") and text.endswith(r"\}") and text.count(r"\{") == 1:
        text, is_list = text[2:-2], True
    elif quantity_of(text):
        return _split(text) if is_list else [text]
    if not is_list and "(" not in text and "[" not in text:
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    elements = _split(_LAST_COMMA.sub(",", text))
    return [sign for element in elements for sign in _both_signs(element)]


def _split(text: str, separators: str = ",;") -> list[str]:
    parts, depth, begin = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in "{([") - (character in "})]")
        if character in separators and depth == 0:
            parts.append(text[begin:place])
            begin = place + 1
    return [part.strip() for part in (*parts, text[begin:]) if part.strip()] or [text]


def _both_signs(text: str) -> list[str]:
    if len(re.findall(r"\\pm(?![a-zA-Z])", text)) != 1:
        return [text]
    before, _, after = text.partition(r"\pm")
    return [f"{before}{sign}{after}".strip() for sign in ("+" * bool(before.strip()), "-")]


def _is_same_element(answer: str, reference: str, algebra: Algebra) -> bool:
    if same_text(answer, reference):
        return True
    (name, sides), (reference_name, reference_sides) = _chain(answer), _chain(reference)
    if name and reference_name and compact(name) != compact(reference_name):
        return False
    if not reference_name and len(reference_sides) > 1:  # an equation
        return len(sides) + bool(name) > 1 and _by_algebra(answer, reference, algebra)
    if all(_is_same_value(part, reference_sides[-1], algebra) for part in sides):
        return True
    is_equation = bool(reference_name) and not name and len(sides) > 1
    return is_equation and _by_algebra(answer, reference, algebra)


def _chain(text: str) -> tuple[str, list[str]]:
    """Return the name of a value, and the sides of the equation that give the value."""
    text = _MEMBER.sub("", text)
    exact = [part.strip() for part in re.split(r"\\approx(?![a-zA-Z])", text) if part.strip()]
    parts = _split(exact[0] if exact else text, "=")
    for place in (0, -1):
        if len(parts) > 1 and _NAME.fullmatch(parts[place]):
            return parts.pop(place), parts
    return "", parts


def _is_same_value(answer: str, reference: str, algebra: Algebra) -> bool:
    if same_text(answer, reference):
        return True
    value, expected = quantity_of(answer), quantity_of(reference)
    if value and expected:
        return same_quantity(value, expected)
    if _is_text(answer) or _is_text(reference):
        return False
    left, right = _coordinates(answer), _coordinates(reference)
    if left and right and left[0] == right[0]:
        return len(left) == len(right) and all(
            _is_same_value(*pair, algebra) for pair in zip(left[1:], right[1:], strict=True)
        )
    return _by_algebra(answer, reference, algebra)


def _coordinates(text: str) -> list[str]:
    """Return both brackets, as one text, and the parts between them; empty without brackets."""
    opening = next((left for left in (r"\langle", "(", "[") if text.startswith(left)), "")
    closing = next((right for right in (r"\rangle", ")", "]") if text.endswith(right)), "")
    inner = text[len(opening) : len(text) - len(closing)]
    if not (opening and closing) or re.search(r"[()\[\]]", inner):
        return []
    parts = _split(inner)
    return [opening + closing, *parts] if len(parts) > 1 else []


def _is_text(text: str) -> bool:
    """Return whether a value is compared as text alone: words, a letter, or misread by algebra."""
    is_letter = len(text) == 1 and text.isalpha()
    return is_letter or bool(words_of(text) or _MISREAD.search(text))


def _by_algebra(answer: str, reference: str, algebra: Algebra) -> bool:
    """Compare by algebra, except an equation with a value: algebra would use its last side."""
    if _is_text(answer) or _is_text(reference):
        return False
    is_equation, is_expected = (_EQUATION.search(_BOUNDS.sub("", t)) for t in (answer, reference))
    return not (is_equation and not is_expected) and algebra(answer, reference)
