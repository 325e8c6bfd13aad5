"""Prompts are filtered by their pass rates in an earlier run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_flow.config import Recipe, build_recipe
from areal_flow.core.errors import ConfigError, PromptError, RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.types import GroupReceipt
from areal_flow.log.codec import receipts
from areal_flow.log.directory import create_run, hold_run
from areal_flow.log.inputs import Verifier, read_inputs, record_inputs
from areal_flow.log.queries import Run, record_pass_rates
from areal_flow.log.run_log import RunLog, create_logs
from areal_flow.log.trajectories import write_groups
from areal_flow.rollout.prompts.prepare import Prepared, prepare_prompts
from areal_flow.rollout.prompts.table import PromptTable
from pipelines.cli.reports import report_difficulty
from pipelines.jobs.prepare import describe_prompts
from pipelines.tiny_jobs.tiny_policy import write_tiny_model
from tests.rows import commit, group_table

REWARDS = ([1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, None, None, None])
"""Of the earlier run's first five prompts: too easy, too hard, two in between, one hardly seen."""


def write_rows(path: Path, places: Sequence[int]) -> Path:
    rows = [{"question": f"{n} + 1 =", "answer": f"#### {n + 1}"} for n in places]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recipe_with(path: Path, **difficulty: Any) -> Recipe:
    prompts = {"source": "file", "path": str(path), "num_held_out": 0, "difficulty": difficulty}
    return build_recipe({"prompts": prompts, "generation": {"max_model_len": 128}}, source="test")


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    folder = tmp_path_factory.mktemp("runs")
    layout, recipe = (
        RunLayout(folder / "earlier"),
        recipe_with(write_rows(folder / "p.jsonl", range(6))),
    )
    create_run(layout, recipe)
    write_tiny_model(layout.model, max_model_len=96)
    prepare_prompts(recipe.prompt_plan(), layout)
    create_logs(layout)
    prompts = PromptTable(layout.train_prompts, seed=0)
    with hold_run(layout) as writer:
        log = RunLog(layout, writer)
        for place, rewards in enumerate(REWARDS):
            table = group_table(place, rewards=rewards)
            tokens = [prompts.row(place).tokens.tolist()] * len(rewards)
            column = table.schema.get_field_index("prompt_tokens")
            field = table.schema.field(column)
            table = table.set_column(column, field, pa.array(tokens, field.type))
            written = write_groups(layout.trajectories, table)
            commit(log, GroupReceipt(place, written, receipts(table)))
    return layout


def prepared(earlier: RunLayout, name: str, **difficulty: Any) -> tuple[Prepared, RunLayout]:
    """Prepare a run with the earlier run's prompts, from another file in another order."""
    layout = RunLayout(earlier.root.with_name(name))
    write_tiny_model(layout.model, max_model_len=96)
    path = write_rows(earlier.root.with_name(f"{name}.jsonl"), [7, 5, 4, 3, 2, 1, 0])
    recipe = recipe_with(path, **{"run": "earlier", **difficulty})
    record_pass_rates(layout, recipe.prompts.difficulty.run)
    prompts = prepare_prompts(recipe.prompt_plan(), layout)
    record_inputs(layout, recipe, verifier=Verifier(), model=layout.model)
    return prompts, layout


def texts(layout: RunLayout) -> list[str]:
    return [prompt.text for prompt in PromptTable(layout.train_prompts, seed=0).rows()]


def test_prompts_within_the_pass_rates_and_unseen_ones_are_kept(earlier: RunLayout) -> None:
    prompts, layout = prepared(earlier, "default")
    assert texts(layout) == [f"{n} + 1 =" for n in (7, 5, 4, 3, 2)]
    summary = (
        "by the pass rates of run earlier: 2 kept, 1 too easy, 1 too hard, 3 unseen (kept, too)"
    )
    assert summary in describe_prompts(prompts, layout)


def test_unseen_prompts_and_prompts_with_few_samples_can_be_left_out(earlier: RunLayout) -> None:
    _, layout = prepared(earlier, "seen", keep_unseen=False, pass_rate_range=(0.3, 0.95))
    assert texts(layout) == ["3 + 1 ="]
    _, layout = prepared(
        earlier, "few", keep_unseen=False, min_samples=1, pass_rate_range=(0.05, 1.0)
    )
    assert texts(layout) == [f"{n} + 1 =" for n in (4, 3, 2, 0)]


def test_run_keeps_the_pass_rates_that_it_was_made_by(earlier: RunLayout) -> None:
    _, layout = prepared(earlier, "stored")
    rates = pq.read_table(layout.difficulty)
    assert sorted(rates["pass_rate"].to_pylist()) == [0.0, 0.25, 0.5, 1.0, 1.0]
    assert rates.schema.metadata[b"run"].decode() == str(earlier.root)
    inputs = read_inputs(layout)
    assert "prompts/difficulty.parquet" in inputs.files
    assert str(earlier.identity) in inputs.sources


def test_distribution_counts_every_prompt_that_was_answered(earlier: RunLayout) -> None:
    report = report_difficulty(Run(earlier.root))
    counts = {row["pass rate"]: row["prompts"] for row in report.parts[0].rows}
    assert counts.pop("to 1") == 2
    assert {label for label, num in counts.items() if num == 1} == {"0", "to 0.25", "to 0.5"}
    assert sum(counts.values()) == 3
    assert len(report.data["prompts"]) == 5


def test_filter_that_leaves_nothing_is_refused_with_the_counts(earlier: RunLayout) -> None:
    with pytest.raises(PromptError, match=r"0 kept, 2 too easy, 2 too hard, 3 unseen \(left out\)"):
        prepared(earlier, "none", keep_unseen=False, pass_rate_range=(0.3, 0.4))
    with pytest.raises(RunError, match="another"):
        prepared(earlier, "gone", run="another")
    with pytest.raises(ConfigError, match=r"pass_rate_range \(\[0.9, 0.1\]\) must be"):
        prepared(earlier, "wrong", pass_rate_range=(0.9, 0.1))
