"""The one renderer of tables and facts, for terminals of any width and for pipes.

No name or number is ever cut. A pipe has no width, so a row stays one line there. On a terminal
that is too narrow columns of prose fold, and a table that does not fit even so is shown row by row,
a line for each of its columns. Only texts that a policy wrote lose their middle, and nothing in
them can move the cursor.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.text import Text

Cell = str | Text

PIPE_WIDTH = 120
"""Columns for texts in a pipe, which has no width of its own."""

_LEAST_PROSE = 12
_LEAST_TEXT = 3
_GAPS = (2, 1)
_NUMBER = re.compile(r"[-+]?[\d,.]*(e[-+]?\d+)?(%| s)?|inf|nan")
_PICTURES = {chr(code): chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {
    "\x7f": "␡",
    **{chr(code): "�" for code in range(0x80, 0xA0)},
}


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


def print_table(
    console: Console,
    labels: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    title: str = "",
    prose: Collection[str] = (),
    texts: Collection[str] = (),
) -> None:
    """Print rows under their labels, columns of numbers to the right.

    Args:
        prose: columns whose cells may go on in the next line.
        texts: columns whose cells are shortened to what is left of a line, also in a pipe.
    """
    cells = [[_text(cell) for cell in row] for row in rows]
    natural = [
        max([len(label), *(row[at].cell_len for row in cells)]) for at, label in enumerate(labels)
    ]
    least = [
        min(width, _LEAST_PROSE if label in prose else _LEAST_TEXT if label in texts else width)
        for label, width in zip(labels, natural, strict=True)
    ]
    rooms = {gap: console.width - gap * (len(labels) - 1) for gap in _GAPS}
    gaps = _GAPS[-1:] if texts else _GAPS
    gap = next((gap for gap in gaps if sum(least) <= rooms[gap]), gaps[-1])
    if title:
        console.print(Text(f"\n{title}", style="bold"), soft_wrap=True)
    if not console.is_terminal and not texts:
        gap, widths = _GAPS[0], natural
    elif not console.is_terminal or sum(least) <= rooms[gap]:
        widths = _shared(natural, least, rooms[gap])
    else:
        _print_row_by_row(console, labels, cells)
        return
    lines = [[Text(label, style="bold") for label in labels], *cells]
    for at in (at for at, label in enumerate(labels) if label in texts):
        for line in lines:
            line[at] = Text(one_line(line[at].plain, widths[at]), line[at].style)
    right = [all(_NUMBER.fullmatch(row[at].plain) for row in cells) for at in range(len(labels))]
    for line in lines:
        _print_row(console, line, widths, right=right, gap=gap)


def print_facts(console: Console, facts: Sequence[tuple[str, Cell]]) -> None:
    """Print a fact a line, each after its label; long ones go on under themselves."""
    labels = [Text(label, style="bold") for label, _ in facts]
    width = max((label.cell_len for label in labels), default=0)
    texts = [_text(fact) for _, fact in facts]
    room = max(_LEAST_PROSE, console.width - width - _GAPS[0])
    if not console.is_terminal:
        room = max([room, *(text.cell_len for text in texts)])
    for label, text in zip(labels, texts, strict=True):
        _print_row(console, [label, text], [width, room], right=[False, False], gap=_GAPS[0])


def _print_row_by_row(
    console: Console, labels: Sequence[str], rows: Sequence[Sequence[Text]]
) -> None:
    for row in rows:
        print_facts(console, [*zip(labels, row, strict=True)])
        console.print()


def _print_row(
    console: Console,
    row: Sequence[Text],
    widths: Sequence[int],
    *,
    right: Sequence[bool],
    gap: int,
) -> None:
    folded = [
        cell.wrap(console, width, overflow="fold") if cell else [cell]
        for cell, width in zip(row, widths, strict=True)
    ]
    for at in range(max(map(len, folded))):
        line = Text()
        for lines, width, to_the_right in zip(folded, widths, right, strict=True):
            part = lines[at] if at < len(lines) else Text()
            part.rstrip()
            part.align("right" if to_the_right else "left", width)
            line.append_text(part).append(" " * gap)
        line.rstrip()
        console.print(line, soft_wrap=True)


def _shared(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Return widths within a room: who needs less than an equal share leaves the rest to others."""
    widths = list(least)
    flexible = sorted(
        (at for at, width in enumerate(natural) if width > least[at]), key=lambda at: natural[at]
    )
    left = room - sum(width for at, width in enumerate(widths) if at not in flexible)
    for number, at in enumerate(flexible):
        widths[at] = max(least[at], min(natural[at], left // (len(flexible) - number)))
        left -= widths[at]
    return widths


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)
