"""What a command found, and the one renderer of it: for a terminal, for a pipe, or as JSON.

No name or number is ever cut. A pipe has no width: a row stays one line there, and texts are whole.
On a terminal that is too narrow columns of prose fold, texts that a policy wrote lose their middle,
and a table that does not fit even so is shown row by row, a line for each of its columns. Nothing
in a text can move the cursor.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich import table as rich_table
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.text import Text

from areal_flow.core.pass_rates import EvaluationScores

PIPE_WIDTH = 10**6
"""A pipe has no width; this is more than any line needs."""
PLAIN: dict[str, Any] = dict.fromkeys(("force_jupyter", "highlight", "markup", "emoji"), False)
"""Settings of a console that takes nothing in a text for markup and knows no notebook."""
_LEAST_PROSE = 12
_LEAST_TEXT = 3
_NUMBER = re.compile(r"[-+]?[\d,.]*(e[-+]?\d+)?(%| s)?|inf|nan")
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {
    0x7F: "␡",
    **dict.fromkeys(range(0x80, 0xA0), "�"),
}


@dataclass(frozen=True, slots=True)
class Report:
    data: Any
    """What `--json` prints."""
    parts: Sequence[RenderableType]
    """Lines, facts and tables, in the order in which they are read."""
    code: int = 0
    """The exit code of the command."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under their labels, columns of numbers to the right."""

    rows: Sequence[Mapping[str, Any]]
    """Texts and numbers by their labels, in the order of the columns; None is a dash."""
    title: str = ""
    prose: Collection[str] = ()
    """Columns whose cells may go on in the next line."""
    texts: Collection[str] = ()
    """Columns whose cells are shortened to what is left of a terminal's line."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(f"\n{self.title}", style="bold")
        for gap in (1,) if self.texts else (2, 1):
            grid, least_width = self._grid(gap)
            if least_width <= options.max_width:
                yield grid
                return
        for row in self.rows:
            yield facts(row.items())
            yield Text()

    def _grid(self, gap: int) -> tuple[rich_table.Table, int]:
        """Return all cells in columns, and the width without which something would be cut."""
        grid = rich_table.Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
        least_width, columns = -gap, []
        for label in self.rows[0] if self.rows else ():
            texts = [Text(label, "bold"), *(_text(row[label]) for row in self.rows)]
            natural = max(text.cell_len for text in texts)
            folds, shortens = label in self.prose, label in self.texts
            least = _LEAST_PROSE if folds else _LEAST_TEXT if shortens else natural
            least_width += gap + min(natural, least)
            head, *cells = map(_Shortened, texts) if shortens else texts
            grid.add_column(
                head,
                justify="right" if all(_NUMBER.fullmatch(t.plain) for t in texts[1:]) else "left",
                overflow="fold",
                min_width=min(natural, least),
                no_wrap=not (folds or shortens),
            )
            columns.append(cells)
        for line in zip(*columns, strict=True):
            grid.add_row(*line)
        return grid, least_width


@dataclass(frozen=True, slots=True)
class _Shortened:
    """A text on one line, without its middle where there is too little room."""

    text: Text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_LEAST_TEXT, max(_LEAST_TEXT, self.text.cell_len))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = one_line(self.text.plain, options.max_width)
        yield Text(line, self.text.style, no_wrap=True, overflow="ellipsis")


def facts(pairs: Iterable[tuple[str, Any]]) -> rich_table.Table:
    grid = rich_table.Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, fact in pairs:
        grid.add_row(Text(label), _text(fact))
    return grid


def show(report: Report, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(report.data, default=plain))
    else:
        print(rendered(make_console(), *report.parts), end="")
    return report.code


def rendered(console: Console, *parts: RenderableType) -> str:
    with console.capture() as captured:
        for part in parts:
            soft_wrap = isinstance(part, str | Text)
            console.print(part, soft_wrap=soft_wrap, markup=False, highlight=False)
    return "\n".join(line.rstrip(" ") for line in captured.get().split("\n"))


def make_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, **PLAIN)


def with_interval(scores: EvaluationScores, name: str) -> str:
    rates = scores.by_name()
    return f"{rates[name]:.3f} [{rates[f'{name}_low']:.3f}, {rates[f'{name}_high']:.3f}]"


def samples_text(scores: EvaluationScores) -> str:
    """Return how many samples each prompt has and, of several, pass@k, the best and the vote."""
    max_samples, min_samples = scores.num_samples, scores.fewest_samples
    if max_samples == 1:
        return "one sample each"
    parts = [f"pass@{k} {rate:.3f}" for k, rate in scores.pass_at.items()]
    if scores.best_of is not None:
        parts.append(f"best reward {scores.best_of:.3f}")
    if scores.majority is not None:
        parts.append(f"majority {scores.majority:.3f}")
    text = (
        f"{max_samples} samples each"
        if max_samples == min_samples
        else f"{min_samples} to {max_samples} samples each"
    )
    return ": ".join([text, *([", ".join(parts)] if parts else [])])


def short_time(moment: datetime) -> str:
    """Return a moment by the clock of this machine, in no more characters than a table has."""
    local, now = moment.astimezone(), datetime.now().astimezone()
    return f"{local:%d %b %H:%M}" if local.year == now.year else f"{local:%Y-%m-%d}"


def plain(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def printable(text: str) -> str:
    """Return text whose control characters are pictures; line feeds and tabs stay."""
    return text.translate(_PICTURES)


def one_line(text: str, width: int) -> str:
    """Return text on one line of at most `width`, its middle left out: answers stand at the end."""
    line = printable(text.replace("\n", "⏎").replace("\t", " ")).strip()
    if len(line) <= width:
        return line
    tail = (width - 1) * 2 // 5
    return f"{line[: width - 1 - tail]}…{line[len(line) - tail :]}"


def _text(cell: Any) -> Text:
    return cell if isinstance(cell, Text) else Text("-" if cell is None else str(cell))
