"""A model and held-out prompts in, a pass rate with its interval out; nothing is trained."""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from areal_flow.cluster.launch import launch_cluster
from areal_flow.cluster.placement import place_workers
from areal_flow.cluster.worker_context import RunPlugin
from areal_flow.config import Recipe, build_recipe, dump_recipe, load_recipe
from areal_flow.errors import ModelError
from areal_flow.layout import RunLayout
from areal_flow.models.directory import check_model_directory, copy_model_description
from areal_flow.prompts.prepare import prepare_held_out
from areal_flow.prompts.table import PromptTable
from areal_flow.types import EvaluationTable
from areal_flow.weights.directory import publish_model_directory
from pipelines.held_out import answer_held_out, tabulate
from pipelines.models import run_of_checkpoint


def evaluate(directory: Path, *, prompts: Path | None, limit: int | None) -> int:
    """Answer held-out prompts once each with a model; print a table and one line of JSON.

    Raises:
        ModelError: the directory is not a model's, or nothing says which prompts to use.
    """
    check_model_directory(directory)
    run = run_of_checkpoint(directory)
    if run is None and prompts is None:
        raise ModelError(f"{directory} lies in no run: give --prompts FILE")
    recipe = _recipe(run, prompts)
    with tempfile.TemporaryDirectory(prefix="areal-flow-evaluate-") as scratch:
        layout = RunLayout(Path(scratch).resolve())
        layout.config.write_text(dump_recipe(recipe))
        copy_model_description(directory, layout.model)
        publish_model_directory(directory, layout.weights_of(0))
        if prompts is None:
            assert run is not None
            table = PromptTable(run.held_out_prompts, seed=recipe.seed)
        else:
            prepare_held_out(recipe, layout)
            table = PromptTable(layout.held_out_prompts, seed=recipe.seed)
        found = asyncio.run(_answer(layout, recipe, table, limit))
    _print(found, directory)
    return 0


def _recipe(run: RunLayout | None, prompts: Path | None) -> Recipe:
    recipe = load_recipe(run.config) if run else Recipe()
    settings = recipe.model_dump(mode="json", exclude_none=True)
    if prompts is not None:
        settings["prompts"] |= {"source": "file", "path": str(prompts.resolve())}
        settings["warm_start"]["num_steps"] = 0
    settings["cluster"]["num_generators"] = 2
    return build_recipe(settings, source=str(run.config) if run else "defaults")


async def _answer(
    layout: RunLayout, recipe: Recipe, table: PromptTable, limit: int | None
) -> EvaluationTable:
    workers = [placed for placed in place_workers(recipe) if placed.role != "trainer"]
    async with launch_cluster(workers, recipe.cluster, RunPlugin(layout.root, 0)) as cluster:
        rows = await cluster.pool.guard(
            answer_held_out(
                cluster.client, table.rows(limit), name="evaluate", seed=recipe.seed, version=0
            )
        )
    return tabulate(rows)


def _print(found: EvaluationTable, directory: Path) -> None:
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
