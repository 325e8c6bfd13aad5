"""Renders the result of a command for a terminal, for a pipe or as JSON, and writes rows to files.

No name or number is ever cut. A pipe has no width: each row is one line there, and texts are in
full. On a terminal that is too narrow, columns of prose fold and the middle of texts is left out; a
table that is still too wide is shown row by row, one line per column. No text can move the cursor.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import table as rich_table
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.text import Text

from areal_flow.core.errors import ConfigError
from areal_flow.core.pass_rates import EvaluationScores

if TYPE_CHECKING:
    import pyarrow as pa

LANCE = ".lance"
PIPE_WIDTH = 10**6
"""A pipe has no width; this is more than any line needs."""
PLAIN: dict[str, Any] = dict.fromkeys(("force_jupyter", "highlight", "markup", "emoji"), False)
"""Settings of a console that interprets no markup and ignores notebooks."""
_MIN_PROSE = 12
_MIN_TEXT = 3
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
    """Lines, facts and tables, in order."""
    code: int = 0
    """The exit code of the command."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under their labels; columns of numbers are right-aligned."""

    rows: Sequence[Mapping[str, Any]]
    """Cells by label, in the order of the columns; None is shown as a dash."""
    title: str = ""
    prose: Collection[str] = ()
    """Columns whose cells may wrap."""
    texts: Collection[str] = ()
    """Columns whose cells are shortened to the rest of a terminal's line."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(f"\n{self.title}", style="bold")
        for gap in (1,) if self.texts else (2, 1):
            grid, min_width = self._grid(gap)
            if min_width <= options.max_width:
                yield grid
                return
        for row in self.rows:
            yield facts(row.items())
            yield Text()

    def _grid(self, gap: int) -> tuple[rich_table.Table, int]:
        """Return all cells in columns, and the smallest width at which nothing is cut."""
        grid = rich_table.Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
        min_width, columns = -gap, []
        for label in self.rows[0] if self.rows else ():
            texts = [Text(label, "bold"), *(_text(row[label]) for row in self.rows)]
            natural = max(text.cell_len for text in texts)
            folds, shortens = label in self.prose, label in self.texts
            narrowest = min(natural, _MIN_PROSE if folds else _MIN_TEXT if shortens else natural)
            min_width += gap + narrowest
            head, *cells = map(_Shortened, texts) if shortens else texts
            grid.add_column(
                head,
                justify="right" if all(_NUMBER.fullmatch(t.plain) for t in texts[1:]) else "left",
                overflow="fold",
                min_width=narrowest,
                no_wrap=not (folds or shortens),
            )
            columns.append(cells)
        for line in zip(*columns, strict=True):
            grid.add_row(*line)
        return grid, min_width


@dataclass(frozen=True, slots=True)
class _Shortened:
    """A text on one line, its middle left out where it is too long."""

    text: Text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_MIN_TEXT, max(_MIN_TEXT, self.text.cell_len))

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
    """Return the samples per prompt and, if there are several, pass@k, best-of-k and majority."""
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
    """Return a time in this machine's time zone, short enough for a table."""
    local, now = moment.astimezone(), datetime.now().astimezone()
    return f"{local:%d %b %H:%M}" if local.year == now.year else f"{local:%Y-%m-%d}"


def plain(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def printable(text: str) -> str:
    """Replace control characters by visible symbols; line feeds and tabs stay."""
    return text.translate(_PICTURES)


def one_line(text: str, width: int) -> str:
    """Return text on one line of at most `width`, without its middle: answers are at the end."""
    line = printable(text.replace("\n", "⏎").replace("\t", " ")).strip()
    if len(line) <= width:
        return line
    tail = (width - 1) * 2 // 5
    return f"{line[: width - 1 - tail]}…{line[len(line) - tail :]}"


def _text(cell: Any) -> Text:
    return cell if isinstance(cell, Text) else Text("-" if cell is None else str(cell))


def check_table_file(path: Path) -> None:
    """Refuse a file that cannot be written."""
    suffixes = [*_WRITERS, LANCE]
    if path.suffix not in suffixes:
        raise ConfigError(f"--to {path}: expected a name that ends in {' or '.join(suffixes)}")
    if path.exists():
        raise ConfigError(f"--to {path}: the file exists already; remove it or choose another")
    if not path.parent.is_dir():
        raise ConfigError(f"--to {path}: the folder {path.parent} does not exist")


def write_table_file(path: Path, tables: Iterable[pa.Table], schema: pa.Schema) -> int:
    """Write tables of one schema in the format of the file's suffix; return the number of rows.

    The file gets its name when it is complete.
    """
    check_table_file(path)
    if path.suffix == LANCE:
        from areal_flow.log.dataset import create_dataset

        return int(create_dataset(path, schema, tables).count_rows())
    partial = path.with_name(f".{path.name}.partial")
    num_rows = 0
    try:
        with _WRITERS[path.suffix](partial, schema) as write:
            for table in tables:
                write(table)
                num_rows += len(table)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    return num_rows


@contextmanager
def _parquet(path: Path, schema: pa.Schema) -> Iterator[Callable[[pa.Table], object]]:
    import pyarrow.parquet as pq  # pyarrow: only where rows are written

    with pq.ParquetWriter(path, schema) as writer:
        yield lambda table: writer.write_table(table.cast(schema))


@contextmanager
def _jsonl(path: Path, _: pa.Schema) -> Iterator[Callable[[pa.Table], object]]:
    with path.open("w", encoding="utf-8") as file:
        yield lambda table: file.writelines(
            json.dumps(row, default=plain, ensure_ascii=False) + "\n" for row in table.to_pylist()
        )


@contextmanager
def _csv(path: Path, schema: pa.Schema) -> Iterator[Callable[[pa.Table], object]]:
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(schema.names)
        yield lambda table: rows.writerows(map(_cell, row.values()) for row in table.to_pylist())


def _cell(value: Any) -> Any:
    return json.dumps(value, default=plain) if isinstance(value, list | dict) else value


_WRITERS = {".parquet": _parquet, ".jsonl": _jsonl, ".csv": _csv}
