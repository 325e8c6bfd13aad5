"""Shows how training goes: a live display on a terminal, elsewhere a line a step."""

from __future__ import annotations

from collections import deque
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from areal_flow.pass_rates import PASS_RATE

WINDOW_STEPS = 8
"""Rates are means over this many steps."""


class Progress:
    """Shows how a run goes: one line a step, for logs and pipes."""

    def __init__(self, num_steps: int, num_generators: int) -> None:
        self._num_steps = num_steps
        self._num_generators = num_generators
        self._rows: deque[dict[str, Any]] = deque(maxlen=WINDOW_STEPS)

    def phase(self, text: str) -> None:
        """Say what begins now."""
        print(text, flush=True)

    def update(self, text: str) -> None:
        """Say how far the current phase is."""
        print(f"  {text}", flush=True)

    def step(self, row: dict[str, Any]) -> None:
        """Show a finished training step."""
        self._rows.append(row)
        self._show(self._values(row))

    def close(self) -> None:
        """Leave the terminal as it was."""

    def _show(self, values: dict[str, str]) -> None:
        print("  ".join(f"{label} {value}" for label, value in values.items()), flush=True)

    def _values(self, row: dict[str, Any]) -> dict[str, str]:
        seconds = max(1e-9, self._sum("seconds_step"))
        left = int(max(0, self._num_steps - row["step"]) * seconds / len(self._rows))
        generating = self._sum("seconds_generate") / (seconds * self._num_generators)
        training = (self._sum("seconds_train") + self._sum("seconds_stage")) / seconds
        return {
            "step": f"{row['step']}/{self._num_steps}",
            "reward": f"{self._sum('reward_mean') / len(self._rows):.3f}",
            "pass": f"{fmean(row['metrics'][PASS_RATE] for row in self._rows):.3f}",
            "length": f"{row['completion_tokens_mean']:.1f}",
            "staleness": f"{row['staleness_mean']:.2f} (max {row['staleness_max']})",
            "generated tok/s": f"{self._sum('num_generated_tokens') / seconds:,.0f}",
            "trained tok/s": f"{self._sum('num_trained_tokens') / seconds:,.0f}",
            "generators busy": f"{min(1.0, generating):.0%}",
            "trainer busy": f"{min(1.0, training):.0%}",
            "left": f"{left // 60}:{left % 60:02d}",
        }

    def _sum(self, column: str) -> float:
        return float(sum(row[column] for row in self._rows))


class LiveProgress(Progress):
    """A list of values that refreshes in place; fits any width."""

    def __init__(self, num_steps: int, num_generators: int, *, console: Console) -> None:
        super().__init__(num_steps, num_generators)
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def phase(self, text: str) -> None:
        self._live.console.print(text, highlight=False)
        self._live.update("")

    def update(self, text: str) -> None:
        self._live.update(f"  {text}")

    def close(self) -> None:
        self._live.stop()

    def _show(self, values: dict[str, str]) -> None:
        grid = Table.grid(padding=(0, 2))
        for label, value in values.items():
            grid.add_row(f"  {label}", value)
        self._live.update(grid)


def make_progress(*, num_steps: int, num_generators: int) -> Progress:
    """Return a live display on a terminal, lines elsewhere."""
    console = Console()
    if console.is_terminal:
        return LiveProgress(num_steps, num_generators, console=console)
    return Progress(num_steps, num_generators)
