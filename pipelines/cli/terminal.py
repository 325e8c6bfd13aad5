"""What a terminal may show of what a policy wrote: nothing in it can move the cursor."""

from __future__ import annotations

import sys

from rich.console import Console

PIPE_WIDTH = 120
"""Columns for texts in a pipe, which has no width of its own."""


def make_console() -> Console:
    """Return a console as wide as the terminal; nothing that is printed is taken for markup."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def printable(text: str) -> str:
    """Return text whose control characters are pictures; line feeds and tabs stay."""
    return "".join(_PICTURES.get(character, character) for character in text)


def one_line(text: str, width: int) -> str:
    """Return text on one line of at most `width`, its middle left out: answers stand at the end."""
    line = printable(text.replace("\n", "⏎").replace("\t", " ")).strip()
    if len(line) <= width:
        return line
    tail = (width - 1) * 2 // 5
    return f"{line[: width - 1 - tail]}…{line[len(line) - tail :]}"


_PICTURES = {chr(code): chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {
    "\x7f": "␡",
    **{chr(code): "�" for code in range(0x80, 0xA0)},
}
