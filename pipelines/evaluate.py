"""A model and held-out prompts in, a pass rate with its interval out; nothing is trained."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_flow.cluster.launchers import local_cluster
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
from pipelines.stop_signals import wait_for


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Pass rates, and the answers that they were counted from: rows of the evaluation schema."""

    table: EvaluationTable
    answers: list[dict[str, Any]]


def evaluate_model(
    directory: Path, *, prompts: Path | None = None, limit: int | None = None
) -> EvaluationResult:
    """Answer held-out prompts once each with a model.

    Args:
        directory: a checkpoint of a run, whose settings hold, or a Hugging Face directory.
        prompts: a file, instead of the run's own held-out prompts.
        limit: answer only the first ones.

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
        answers = wait_for(lambda: _answer(layout, recipe, table, limit))
    return EvaluationResult(tabulate(answers), answers)


def _recipe(run: RunLayout | None, prompts: Path | None) -> Recipe:
    recipe = load_recipe(run.config) if run else Recipe()
    settings = recipe.model_dump(mode="json", exclude_none=True)
    if prompts is not None:
        settings["prompts"] |= {"source": "file", "path": str(prompts.resolve())}
    settings["cluster"]["num_generators"] = 2
    return build_recipe(settings, source=str(run.config) if run else "defaults")


async def _answer(
    layout: RunLayout, recipe: Recipe, table: PromptTable, limit: int | None
) -> list[dict[str, Any]]:
    workers = [placed for placed in place_workers(recipe) if placed.role != "trainer"]
    async with local_cluster(workers, recipe.cluster, RunPlugin(layout.root, 0)) as cluster:
        return await cluster.pool.guard(
            answer_held_out(
                cluster.client, table.rows(limit), name="evaluate", seed=recipe.seed, version=0
            )
        )
