"""Shows how a job goes: a live display on a terminal, elsewhere lines, and both in its log."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from statistics import fmean
from time import monotonic
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from areal_flow.controller import speed
from areal_flow.pass_rates import PASS_RATE
from areal_flow.types import SKIPPED_UPDATES
from pipelines.cli.run_log import log

WINDOW_STEPS = 8
"""Rates are means over this many steps."""
LINE_EVERY_S = 5.0
"""A phase that counts prints no line sooner after its last one, but for its end."""
BAR_WIDTH = 32


class Progress:
    """Shows how a job goes in lines, for logs and pipes."""

    def __init__(self, num_steps: int = 0, num_generators: int = 0, *, console: Console) -> None:
        self.console = console
        self._num_steps = num_steps
        self._num_generators = num_generators
        self._rows: deque[dict[str, Any]] = deque(maxlen=WINDOW_STEPS)
        self._counted_at = 0.0

    def phase(self, text: str) -> None:
        """Say what begins now."""
        self._counted_at = 0.0
        self._line(text)

    def count(self, what: str, done: int, total: int, note: str = "") -> None:
        """Say how far the current phase is."""
        self._show_count(f"  {what} {done}/{total}{note}", done, total)
        now = monotonic()
        if done >= total or now - self._counted_at >= LINE_EVERY_S:
            self._counted_at = now
            self._count_line(f"  {what} {done}/{total}{note}")

    def step(self, row: dict[str, Any]) -> None:
        """Show a finished training step."""
        self._rows.append(row)
        values = self._values(row)
        self._show_step(row, values)
        self._step_line("  ".join(f"{label} {value}" for label, value in values.items()))

    def close(self) -> None:
        """Leave the terminal as it was."""

    def _line(self, text: str) -> None:
        """Print a line that stays; it is in the log first, whatever ends the process then."""
        log(text)
        self.console.print(text, soft_wrap=True)
        self.console.file.flush()

    _count_line = _step_line = _line

    def _show_count(self, text: str, done: int, total: int) -> None:
        """Show how far a phase is where that can be taken back."""

    def _show_step(self, row: dict[str, Any], values: dict[str, str]) -> None:
        """Show a step where that can be taken back."""

    def _values(self, row: dict[str, Any]) -> dict[str, str]:
        totals = {column: max(1e-9, self._sum(column)) for column in speed.COLUMNS}
        found = speed.speed_metrics(totals, num_generators=self._num_generators)
        rate = {name.removeprefix(speed.AREA): value for name, value in found.items()}
        steps_left = max(0, self._num_steps - row["step"])
        left = int(steps_left * totals["seconds_step"] / len(self._rows))
        num_skipped = sum(row["metrics"].get(SKIPPED_UPDATES, 0.0) > 0 for row in self._rows)
        return {
            "step": f"{row['step']}/{self._num_steps}",
            "reward": f"{self._sum('reward_mean') / len(self._rows):.3f}",
            "pass": f"{fmean(row['metrics'][PASS_RATE] for row in self._rows):.3f}",
            "length": f"{row['completion_tokens_mean']:.1f}",
            "staleness": f"{row['staleness_mean']:.2f} (max {row['staleness_max']})",
            "generated tok/s": f"{rate['generated_tokens_per_s']:,.0f}",
            "trained tok/s": f"{rate['trained_tokens_per_s']:,.0f}",
            "generators busy": f"{min(1.0, rate['generators_busy_fraction']):.0%}",
            "trainer busy": f"{min(1.0, rate['trainer_busy_fraction']):.0%}",
            "left": f"{left // 60}:{left % 60:02d}",
            **({"SKIPPED": f"{num_skipped} of {len(self._rows)} steps"} if num_skipped else {}),
        }

    def _sum(self, column: str) -> float:
        return float(sum(row[column] for row in self._rows))


class LiveProgress(Progress):
    """A picture that refreshes in place and fits any width; the last one of each phase stays."""

    def __init__(self, num_steps: int = 0, num_generators: int = 0, *, console: Console) -> None:
        super().__init__(num_steps, num_generators, console=console)
        self._picture: RenderableType | None = None
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def phase(self, text: str) -> None:
        self._keep_picture()
        super().phase(text)
        self._live.update(Spinner("dots", ""))

    def close(self) -> None:
        self._keep_picture()
        self._live.stop()

    def _keep_picture(self) -> None:
        if self._picture is not None:
            self.console.print(self._picture)
        self._picture = None
        self._live.update("")

    def _count_line(self, text: str) -> None:
        log(text)

    _step_line = _count_line

    def _show_count(self, text: str, done: int, total: int) -> None:
        self._show(Group(text, _bar(done, total)))

    def _show_step(self, row: dict[str, Any], values: dict[str, str]) -> None:
        grid = Table.grid(padding=(0, 2))
        for label, value in values.items():
            grid.add_row(f"  {label}", value)
        self._show(Group(grid, _bar(row["step"], self._num_steps)))

    def _show(self, picture: RenderableType) -> None:
        self._picture = picture
        self._live.update(picture)


def _bar(done: int, total: int) -> Table:
    bar = Table.grid()
    bar.add_row("  ", ProgressBar(total=max(1, total), completed=done, width=BAR_WIDTH))
    return bar


def make_progress(
    *, num_steps: int = 0, num_generators: int = 0, to_stderr: bool = False
) -> Progress:
    """Return a live display on a terminal, lines elsewhere.

    Args:
        to_stderr: of a command whose result stands on standard output.
    """
    stream = sys.stderr if to_stderr else sys.stdout
    console = Console(stderr=to_stderr, highlight=False, markup=False, emoji=False)
    show = LiveProgress if stream.isatty() and console.is_terminal else Progress
    return show(num_steps, num_generators, console=console)


def counted(answer: Callable[..., Awaitable[Any]], progress: Progress, *, total: int) -> Any:
    """Return `answer`, with the prompts that it has answered so far counted."""
    num_answered = 0

    async def answer_and_count(episodes: Sequence[Any], *, name: str) -> Any:
        nonlocal num_answered
        table = await answer(episodes, name=name)
        num_answered += len(episodes)
        progress.count("answered", num_answered, total)
        return table

    return answer_and_count
