"""What a policy wrote in, what a terminal may show out: nothing in it can move the cursor."""

from __future__ import annotations

import sys

from rich.console import Console

_PIPE_WIDTH = 120


def make_console() -> Console:
    """Return a console as wide as the terminal, or as a file is comfortably read."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


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
