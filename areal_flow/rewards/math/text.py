r"""Extracts the final answer of a completion, and tidies its text for comparison.

The final answer is the content of the last `\boxed{}`, else what follows the last `####`, else what
follows "the answer is", else the last line. Nothing here evaluates anything.
"""

from __future__ import annotations

import re
from typing import Any

from areal_flow.core.thinking import after_thinking
from areal_flow.core.types import answer_text

MAX_CHARS = 300
MAX_NESTING = 40
MAX_EXPONENT = 10**4
MAX_FACTORIAL = 1000
MAX_ELEMENTS = 64
_LINK_CHARS = 40
_TAIL_CHARS = 2000
"""Length of the tail in which an unmarked answer is searched."""

MARK, BOX = "####", "\\boxed"
_LINK = re.compile(r"[\s$\\()]*(?:[,;]|\b(?:and|or)\b)[\s$\\()]*(?:and|or)?[\s$\\()]*")
_OPENING, _BRACE = re.compile(r"[^\S\n]*\{?"), re.compile(r"(?<!\\)[{}]")
_LINE_END = re.compile(r"[\n$]|\Z")
_ANSWER_IS = re.compile(r"(?:\banswer\s*(?:is\s*:?|:|=)|^\s*a\s*:)[*\s]*(\S.*)", re.I | re.M)
_ARITHMETIC = re.compile(r"\d[^\d=]{0,20}?(?:[-−–+*/×÷]|\bx\b)[^\d=]{0,20}?\d")
_VARIABLE = re.compile(r"\d[a-zA-Z]\b|[\\^_]")
_SENTENCE_END = re.compile(r"[.!?;]\s")
_BULLET, _EXCLAMATION = re.compile(r"^\s*[-*•]\s+"), re.compile(r"!+(?=[*_\s]*$)")
_DIGITS = re.compile(r"-?\d+", re.ASCII)
_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_REPLACEMENTS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*(\d|\\pi)\s*(\d)(?!\d)", r"\\frac{\1}{\2}"),
        (r"\\(?:left|right|bigg?|Bigg?)(?![a-zA-Z])|(?<!\\)\\!|\\displaystyle(?![a-zA-Z])", ""),
        (r"\\(?:text(?:bf|rm|it|normal)?|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 "),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![a-zA-Z])|°", ""),
        (r"(?<=\d)(?:\{,\}|\\,)(?=\d{3})", ","),
        (r"(?<!\\)\\[,;: ~]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\%|\bpercent\b", "%"),
        (r"\\leq(?:slant)?(?![a-zA-Z])|<=", r"\\le "),
        (r"\\geq(?:slant)?(?![a-zA-Z])|>=", r"\\ge "),
        (r"!=", r"\\ne "),
        (r"\b([ap])\.\s?m\b\.?", r"\1m"),
        (r":=|==", "="),
        (r"(?<![\w\\)}\]|*])(\*\*?|__?)(\S(?:[^*_\n]*\S)?)\1(?!\w)", r"\2"),
        (r"(?<=[\w)}])\s?\*\*\s?(?=[\w({\\-])", "^"),
        (r"\\?[$€£¥]|(?<!\\)\\[()\[\]]|\*\*", ""),
        (r"([_^])\{(\w)\}", r"\1\2"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"\s+", " "),
        (r"^ ?\(([A-Z])\)[ .]*$", r"\1"),
    )
)
_CHARACTERS = str.maketrans(
    dict.fromkeys("−–‐‑‒﹣－", "-")
    | {"＋": "+", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
     "≤": r"\le ", "≥": r"\ge ", "≈": r"\approx ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ",
     "∅": r"\emptyset ", "∈": r"\in ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}",
     "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "\u00a0": " ", "\u202f": " ", "\u2009": " "}
)  # fmt: skip
_SPACE = re.compile(r"(?<!\d) | (?!\d)")
_ROOT = re.compile(r"√\s*(\d+|[a-zA-Z]|\([^()]*\))")
_EXPONENT = re.compile(r"(?:\^|\*\*)\s*[{(\s]*[-+]?(\d+)")
_TOWER = re.compile(r"(?:\^|\*\*)\s*[{(\s]*[-+]?\d+\s*(?:\^|\*\*)")
_FACTORIAL = re.compile(r"(\d+)\s*!")
_HUGE_FACTORIAL = re.compile(r"![\s)}]*!|\^\s*\{?\d+[\s)}]*!")


def final_answer(completion: str, prompt: str = "", *, is_reference: bool = False) -> str | None:
    """Return the final answer of a completion, verbatim; None without one.

    Unless it is marked or a reference, a leading `- ` (of a list) is not a minus sign, and a
    trailing `!` (of a sentence) is not a factorial.
    """
    completion = after_thinking(completion, prompt)
    if (marked := marked_answer(completion)) is not None:
        return marked
    if BOX in completion or MARK in completion:
        return None
    text = _ANNOTATION.sub("", completion[-_TAIL_CHARS:]).strip()
    if sentences := _ANSWER_IS.findall(text):
        line = _SENTENCE_END.split(sentences[-1], maxsplit=1)[0]
    else:
        line = text.rpartition("\n")[2]
        line = line if is_reference else _BULLET.sub("", line)
    line = line if is_reference else _EXCLAMATION.sub("", line)
    return _result(line).strip() or None


def _result(line: str) -> str:
    """Return the result of arithmetic at the end of a line: `18` of `so it is 9 * 2 = 18`."""
    left, _, right = line.rpartition("=")
    is_arithmetic = _ARITHMETIC.search(left) and not _VARIABLE.search(left)
    return right if is_arithmetic and re.match(r"[^<]*\d[^<]*$", right) else line


def marked_answer(text: str) -> str | None:
    """Return the content of the last non-empty box, else the line after the last `####`."""
    if boxed := _boxed_answer(text, max_chars=4 * MAX_CHARS):
        return boxed
    return _after_mark(text).partition("\n")[0].strip() or None


def marked_text(text: str) -> str | None:
    """Like `marked_answer`, at any length: a whole box, or all that follows the last `####`."""
    return _boxed_answer(text, max_chars=len(text)) or _after_mark(text) or None


def _after_mark(text: str) -> str:
    return text.rpartition(MARK)[2].strip() if MARK in text else ""


def _boxed_answer(text: str, *, max_chars: int) -> str:
    """Return the contents of the last boxes, separated by at most a comma; empty without one."""
    boxes: list[str] = []
    end = after = len(text)
    for _ in range(MAX_ELEMENTS + 1):
        if (start := text.rfind(BOX, 0, end)) < 0:
            break
        content, stop = _boxed(text, start + len(BOX), max_chars)
        if boxes and not (0 <= after - stop <= _LINK_CHARS and _LINK.fullmatch(text[stop:after])):
            break
        end = start
        if content and BOX not in content:
            boxes.insert(0, content)
            after = start
    return ", ".join(dict.fromkeys(boxes))


def _boxed(text: str, start: int, max_chars: int) -> tuple[str, int]:
    """Return the content of a box and its end; an unclosed box ends with its line."""
    limit = start + max_chars
    opening = _OPENING.match(text, start)
    line_end = _LINE_END.search(text, start, limit)
    assert opening is not None  # both patterns match the empty string, too
    assert line_end is not None
    begin, end = opening.end(), line_end.start()
    depth = int(opening[0].endswith("{"))
    if depth:
        for brace in _BRACE.finditer(text, begin, limit):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return text[begin : brace.start()].strip(), brace.end()
    return text[begin:end].strip(), max(begin, end)


def reference_text(answer: Any) -> str:
    """Return a row's reference answer as text: the marked part, else all of it."""
    if answer is None or isinstance(answer, dict):
        return ""
    if isinstance(answer, list):
        return ", ".join(map(answer_text, answer))
    text = answer_text(answer)
    return (marked_answer(text) or text).strip()


def tidied(text: str) -> str:
    """Return an answer without typesetting: dollars, spaces, `\\left`, degrees, `\\text`."""
    if _DIGITS.fullmatch(text):
        return text
    text = _ROOT.sub(r"\\sqrt{\1}", text.translate(_CHARACTERS)).strip()
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return text.strip().rstrip(".").strip()


def unbraced(text: str) -> str:
    """Return a text without braces around all of it."""
    while text.startswith("{") and _boxed(text, 0, len(text)) == (text[1:-1].strip(), len(text)):
        text = text[1:-1].strip()
    return text


def compact(text: str) -> str:
    """Return a tidied answer for comparison as text; case counts in LaTeX alone."""
    text = _SPACE.sub("", text)
    return text if "\\" in text else text.casefold()


def excess(text: str) -> str:
    """Return which limit an answer exceeds, so that it is not read as mathematics; else empty."""
    if len(text) > MAX_CHARS:
        return f"{len(text)} characters, expected at most {MAX_CHARS}"
    if not text.isascii() and any(c.isdigit() and not c.isascii() for c in text):
        return "digits that are not ASCII"
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        return f"{deepest} levels of brackets, expected at most {MAX_NESTING}"
    if any(int(exponent) > MAX_EXPONENT for exponent in _EXPONENT.findall(text)) or _TOWER.search(
        text
    ):
        return f"an exponent above {MAX_EXPONENT}, or one with an exponent"
    numbers = map(int, _FACTORIAL.findall(text))
    if _HUGE_FACTORIAL.search(text) or any(number > MAX_FACTORIAL for number in numbers):
        return f"a factorial of more than {MAX_FACTORIAL}, or of a power or another factorial"
    if text.count(",") + text.count(";") >= MAX_ELEMENTS:
        return f"more than {MAX_ELEMENTS} elements"
    return ""
