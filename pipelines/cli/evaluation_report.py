"""Pass rates of an evaluation, on a terminal."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from areal_flow.types import EvaluationTable


def print_evaluation(found: EvaluationTable, directory: Path) -> None:
    """Print a table by difficulty, and one line of JSON."""
    table = Table(title=f"{directory.name}: held-out prompts, one sample each")
    for label in ("difficulty", "prompts", "pass rate", "95% interval", "mean length"):
        table.add_column(label, justify="right")
    for difficulty, (rate, length) in found.by_difficulty.items():
        interval = f"[{rate.low:.3f}, {rate.high:.3f}]"
        table.add_row(
            str(difficulty), str(rate.n), f"{rate.pass_rate:.3f}", interval, f"{length:.1f}"
        )
    Console().print(table, markup=False)
    print(json.dumps(asdict(found.overall)))
