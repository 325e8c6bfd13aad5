"""Pass rates of an evaluation, on a terminal."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from areal_flow.types import EvaluationTable
from pipelines.cli.tables import print_table
from pipelines.cli.terminal import make_console


def print_evaluation(found: EvaluationTable, directory: Path) -> None:
    """Print a table by difficulty, and one line of JSON."""
    rows = [
        (
            str(difficulty),
            str(rate.n),
            f"{rate.pass_rate:.3f}",
            f"[{rate.low:.3f}, {rate.high:.3f}]",
            f"{length:.1f}",
        )
        for difficulty, (rate, length) in found.by_difficulty.items()
    ]
    labels = ("difficulty", "prompts", "pass rate", "95% interval", "mean length")
    title = f"{directory.name}: held-out prompts, one sample each"
    print_table(make_console(), labels, rows, title=title)
    print(json.dumps(asdict(found.overall)))
