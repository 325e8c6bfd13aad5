"""Runs with a few ledger rows, for tests of sinks."""

from __future__ import annotations

import shutil
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from areal_flow.config import Recipe
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import hold_lease
from areal_flow.core.pass_rates import PASS_RATE
from areal_flow.core.types import PolicyHashes
from areal_flow.log.dataset import create_dataset
from areal_flow.log.directory import create_run, write_identity
from areal_flow.log.inputs import Verifier, record_inputs
from areal_flow.log.ledger import STEPS
from areal_flow.log.ledger_row import Provenance, genesis_row
from areal_flow.log.run_log import RunLog, create_logs
from tests.rows import append

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def make_bare_run(root: Path, recipe: str = "") -> RunLayout:
    """Make a run with only its identity and its recipe."""
    made = RunLayout(root.resolve())
    made.root.mkdir(parents=True)
    write_identity(made)
    made.config.write_text(recipe)
    return made


def make_run(root: Path) -> RunLayout:
    """Make a run with the steps 0 to 3."""
    made = RunLayout(root)
    create_run(made, Recipe(seed=3), recipe_name="sums")
    for path in (made.model / "config.json", made.train_prompts):
        path.parent.mkdir()
        path.write_text(path.name)
    record_inputs(made, Recipe(), verifier=Verifier("numeric@0"), model=made.model)
    create_logs(made)
    append_steps(made, 0, 1, 2, 3)
    return made


def step_row(step: int, **columns: Any) -> dict[str, Any]:
    hashes = {field.name: "h" for field in fields(PolicyHashes)}
    genesis = genesis_row(
        PolicyHashes(**{**hashes, "weights_hash": f"w{step}"}),
        provenance=Provenance(1, "config", "code"),
        numeric_environment="{}",
    )
    return {
        **genesis,
        "step": step,
        "loss": 1 / max(1, step),
        "reward_mean": 0.1 * step,
        "metrics": {PASS_RATE: 0.25 * step},
        "trajectory_watermark": 100 * step,
        "committed_at": BEGAN + timedelta(seconds=step),
        **columns,
    }


def make_old_run(root: Path, *, num_steps: int) -> RunLayout:
    """Make a run of many steps, written in one go."""
    layout = make_run(root)
    shutil.rmtree(layout.steps)
    rows = [step_row(step, step_s=1.0) for step in range(num_steps + 1)]
    create_dataset(layout.steps, STEPS, [pa.Table.from_pylist(rows, schema=STEPS)])
    return layout


def append_steps(layout: RunLayout, *steps: int) -> None:
    with hold_lease(layout.writers) as writer:
        append(RunLog(layout, writer), *map(step_row, steps))
