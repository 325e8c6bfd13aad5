"""Progress of a job: in place on a terminal or in a notebook, elsewhere line by line.

Everything is also written to the job's log. A step is shown with its own values; means and rates
over several steps are labelled as such.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from io import StringIO
from math import isfinite
from statistics import fmean
from time import monotonic
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table

from areal_flow.core.pass_rates import PASS_RATE
from areal_flow.core.types import SKIPPED_UPDATES, SPEED_AREA
from areal_flow.flow.diagnosis import speed_of
from pipelines.console.run_log import log
from pipelines.console.tables import PLAIN

WINDOW_STEPS = 8
"""Rates are over the last this many steps."""
LINE_EVERY_S = 5.0
"""Minimum time between two lines of a counter, except for its last line."""
BAR_WIDTH = 32
PICTURE_WIDTH = 68
CELL_WIDTH = 76
CELL_HTML = '<pre style="font-family: monospace; line-height: 1.25; overflow-x: auto">{code}</pre>'


class Lines:
    """Prints lines and no live picture: for logs and pipes."""

    is_live = False

    def __init__(self, console: Console) -> None:
        self._console = console

    def keep(self, part: RenderableType) -> None:
        self._console.print(part, soft_wrap=isinstance(part, str))
        self._console.file.flush()

    def draw(self, picture: RenderableType | None) -> None:
        """Replace the live picture below the lines; None while there is nothing to show."""

    def close(self) -> None:
        """Remove the live picture."""


class Terminal(Lines):
    """Refreshes the picture in place, at any width."""

    is_live = True

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def draw(self, picture: RenderableType | None) -> None:
        self._live.update(Spinner("dots", "") if picture is None else picture)

    def close(self) -> None:
        self._live.stop()


class NotebookCell(Lines):
    """One display of a notebook cell: the lines, and the live picture below them."""

    is_live = True

    def __init__(self) -> None:
        from IPython.display import display

        cell: dict[str, Any] = {"width": CELL_WIDTH, "file": StringIO(), "force_terminal": True}
        super().__init__(Console(**cell, record=True, color_system="truecolor", **PLAIN))
        self._lines: list[RenderableType] = []
        self._display = display({"text/plain": ""}, raw=True, display_id=True)

    def keep(self, part: RenderableType) -> None:
        self._lines.append(part)

    def draw(self, picture: RenderableType | None) -> None:
        parts = self._lines if picture is None else [*self._lines, picture]
        self._console.print(*parts, sep="\n")
        html = self._console.export_html(code_format=CELL_HTML, inline_styles=True, clear=False)
        text = self._console.export_text()
        self._console.file = StringIO()  # a recording console also writes to its file
        self._display.update({"text/html": html, "text/plain": text}, raw=True)


class Progress:
    """Shows phases, counters and steps of a job; the last picture of a phase stays on the screen.

    Without a live picture each step is a line, and a counter prints a line every few seconds.
    """

    def __init__(self, num_steps: int = 0, num_generators: int = 0, *, screen: Lines) -> None:
        self._screen = screen
        self._num_steps = num_steps
        self._num_generators = num_generators
        self._rows: deque[dict[str, Any]] = deque(maxlen=WINDOW_STEPS)
        self._curves: list[tuple[float, ...]] = []
        self._counted_at = 0.0
        self._picture: RenderableType | None = None

    def phase(self, text: str) -> None:
        self._keep_picture()
        self._counted_at = 0.0
        log(text)  # first, in case the process is killed
        self._screen.keep(text)
        self._screen.draw(None)

    def count(self, what: str, done: int, total: int, note: str = "") -> None:
        text = f"{what} {done}/{total}{note}"
        self._show(Group(text, _bar(done, total)))
        now = monotonic()
        if done >= total or now - self._counted_at >= LINE_EVERY_S:
            self._counted_at = now
            self._line(f"  {text}")

    def step(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self._curves.append(_numbers([row]))
        left, rates = self._left(), self._rates()
        self._show(self._steps_picture(left, rates))
        step = {"step": f"{row['step']}/{self._num_steps}"}
        shown = {**step, **_values([row]), "left": left, **rates}
        self._line("  ".join(f"{label} {value}" for label, value in shown.items()))

    def close(self) -> None:
        self._keep_picture()
        self._screen.close()

    def _line(self, text: str) -> None:
        """Log a line, and print it if no live picture shows it."""
        log(text)
        if not self._screen.is_live:
            self._screen.keep(text)

    def _show(self, picture: RenderableType) -> None:
        if self._screen.is_live:
            self._picture = Padding(picture, (0, 0, 0, 2), expand=False)
            self._screen.draw(self._picture)

    def _keep_picture(self) -> None:
        if self._picture is not None:
            self._screen.keep(self._picture)
        self._picture = None

    def _left(self) -> str:
        steps_left = max(0, self._num_steps - self._rows[-1]["step"])
        left = int(steps_left * fmean(row["step_s"] for row in self._rows))
        return f"{left // 60}:{left % 60:02d}"

    def _rates(self) -> dict[str, str]:
        """Return rates over the last steps, and the number of steps with a skipped update."""
        rows = [{**row["metrics"], **row} for row in self._rows]
        speeds = speed_of(rows, num_generators=self._num_generators)
        rate = {name.removeprefix(SPEED_AREA): value for name, value in speeds.items()}
        num_skipped = sum(row.get(SKIPPED_UPDATES, 0.0) > 0 for row in rows)
        return {
            "generated tok/s": f"{rate['generated_tokens_per_s']:,.0f}",
            "trained tok/s": f"{rate['trained_tokens_per_s']:,.0f}",
            "generators busy": f"{rate['generators_busy_fraction']:.0%}",
            "trainer busy": f"{rate['trainer_busy_fraction']:.0%}",
            **({"SKIPPED": f"{num_skipped} of {len(rows)} steps"} if num_skipped else {}),
        }

    def _steps_picture(self, left: str, rates: Mapping[str, str]) -> Group:
        """Return values of the last step with sparklines, and rates with bars."""
        columns = Column(no_wrap=True), Column(no_wrap=True, justify="right"), Column(ratio=1)
        picture = Table.grid(*columns, padding=(0, 2, 0, 0), expand=True)
        last, done, total = self._rows[-1], self._rows[-1]["step"], self._num_steps
        picture.add_row("step", f"{done}/{total}", _bar(done, total))
        picture.add_row("left", left)
        for i, (label, value) in enumerate(_values([last]).items()):
            picture.add_row(label, value, Sparkline([numbers[i] for numbers in self._curves]))
        for label, value in rates.items():
            picture.add_row(label, value, _bar(int(value[:-1]), 100) if "%" in value else "")
        several = f"the last {len(self._rows)} steps" if len(self._rows) > 1 else "this step"
        return Group(Constrain(picture, PICTURE_WIDTH), f"tok/s and busy over {several}")


def _values(rows: Collection[Mapping[str, Any]]) -> dict[str, str]:
    oldest = max(row["staleness_max"] for row in rows)
    reward, passed, length, staleness = _numbers(rows)
    return {
        "reward": f"{reward:.3f}",
        "pass": f"{passed:.3f}",
        "length": f"{length:.1f}",
        "staleness": f"{staleness:.2f} (max {oldest})",
    }


def _numbers(rows: Collection[Mapping[str, Any]]) -> tuple[float, ...]:
    names = ("reward_mean", PASS_RATE, "completion_tokens_mean", "staleness_mean")
    return tuple(fmean({**row["metrics"], **row}[name] for row in rows) for name in names)


class Sparkline:
    """Finite numbers as at most `BAR_WIDTH` bars of one character, each the mean of its share."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self._numbers = [*filter(isfinite, numbers)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        levels, numbers = " .:-=+*#" if options.ascii_only else "▁▂▃▄▅▆▇█", self._numbers
        share = -(-len(numbers) // max(1, min(options.max_width, BAR_WIDTH))) or 1
        means = [fmean(numbers[i : i + share]) for i in range(0, len(numbers), share)]
        low, high = min(means, default=0), max(means, default=0)
        yield "".join(levels[round(7 * (mean - low) / (high - low or 1))] for mean in means)


def _bar(done: float, total: float) -> ProgressBar:
    return ProgressBar(total=max(1, total), completed=done, width=BAR_WIDTH)


def make_progress(
    *, num_steps: int = 0, num_generators: int = 0, to_stderr: bool = False
) -> Progress:
    """Return a live display on a terminal or in a notebook, lines elsewhere."""
    stream = sys.stderr if to_stderr else sys.stdout
    console = Console(stderr=to_stderr, highlight=False, markup=False, emoji=False)
    screen = Lines(console)
    if console.is_jupyter:
        screen = NotebookCell()
    elif stream.isatty() and console.is_terminal:
        screen = Terminal(console)
    return Progress(num_steps, num_generators, screen=screen)


def line_progress() -> Progress:
    """Return progress in lines, also in a notebook, where a run has only one display."""
    return Progress(screen=Lines(Console(**PLAIN)))


def counted(answer: Callable[..., Awaitable[Any]], progress: Progress, *, total: int) -> Any:
    num_answered = 0

    async def answer_and_count(episodes: Sequence[Any], *, name: str) -> Any:
        nonlocal num_answered
        table = await answer(episodes, name=name)
        num_answered += len(episodes)
        progress.count("answered", num_answered, total)
        return table

    return answer_and_count
