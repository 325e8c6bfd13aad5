"""Evaluates a model that need not be a run's: as a run would, through its workflow and rewards.

Workers are told everything by a run directory. So a model is evaluated in one that is made for the
occasion, with the model's weights published as version 0 and nothing that a log would need.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import pyarrow as pa

from areal_flow.cluster.adapters import DaskRollouts
from areal_flow.cluster.launch import launch_cluster
from areal_flow.cluster.placement import place_workers
from areal_flow.cluster.worker_context import WorkerContext
from areal_flow.config import Recipe, build_recipe, dump_recipe, load_recipe
from areal_flow.errors import ConfigError, ModelError
from areal_flow.evaluation import answer_held_out
from areal_flow.generation.registry import require_served
from areal_flow.layout import RunLayout
from areal_flow.models.directory import (
    check_model_directory,
    copy_model_description,
    texts_of,
    tokenizer_of,
)
from areal_flow.paired import PairedComparison, compare_answers
from areal_flow.pass_rates import PASS_THRESHOLD, rows_by_set, tabulate
from areal_flow.prompts.prepare import prepare_held_out
from areal_flow.prompts.table import PromptTable
from areal_flow.store.committed import EVALUATIONS
from areal_flow.types import EvaluationTable, Prompt
from areal_flow.weights.directory import DirectoryReader, publish_model_directory
from pipelines.cli.progress import Progress, counted, make_progress
from pipelines.models import run_of_checkpoint
from pipelines.preflight import check_devices
from pipelines.stop_signals import wait_for

NO_WRITER = 0
"""The writer epoch of what no run's driver writes."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Pass rates, mean rewards, and the answers behind them: rows of the evaluation schema."""

    table: EvaluationTable
    answers: list[dict[str, Any]]
    title: str = ""
    """What the model is called."""
    pass_threshold: float = PASS_THRESHOLD


def compare_models(first: EvaluationResult, second: EvaluationResult) -> PairedComparison:
    """Compare a model with another one on the same prompts, by the second's rule of what passes.

    Raises:
        ModelError: they answered other prompts.
    """
    return compare_answers(first.answers, second.answers, threshold=second.pass_threshold)


def compare_by_set(
    first: EvaluationResult, second: EvaluationResult
) -> dict[str, PairedComparison]:
    """Compare two models that answered the same prompts, on each held-out set by its name."""
    sets = rows_by_set(first.answers), rows_by_set(second.answers)
    threshold = second.pass_threshold
    return {
        name: compare_answers(sets[0][name], sets[1][name], threshold=threshold) for name in sets[0]
    }


def answers_table(results: Sequence[EvaluationResult]) -> pa.Table:
    """Return all answers as a table of the evaluation schema, with the `model` of each."""
    answers = [pa.Table.from_pylist(result.answers, EVALUATIONS) for result in results]
    names = [pa.array([r.title] * len(r.answers), pa.string()) for r in results]
    named = zip(answers, names, strict=True)
    return pa.concat_tables(table.append_column("model", name) for table, name in named)


def evaluate_model(
    directory: Path, *, data: Sequence[str] = (), limit: int | None = None, title: str = ""
) -> EvaluationResult:
    """Answer held-out prompts with a model; how far it is goes to standard error.

    Args:
        directory: a checkpoint of a run, whose settings hold, or a Hugging Face directory.
        data: files, PATH or NAME=PATH each, instead of the run's own held-out sets.
        limit: answer only the first ones of each set.
        title: what the model is called; its directory by default.

    Raises:
        ModelError: the directory is not a model's, or nothing says which prompts to use.
        ConfigError: two files have one name.
        PromptError: a row of a file is wrong.
    """
    check_model_directory(directory)
    run = run_of_checkpoint(directory)
    if run is None and not data:
        raise ModelError(f"{directory} lies in no run: give --data FILE")
    given: dict[str, dict[str, Any]] = {"cluster": {"num_generators": 2}}
    if data:
        given["evaluation"] = {"held_out": _with_sets_of(run, held_out_sets(data))}
    recipe = load_recipe(run.config, given) if run else build_recipe(given, source="defaults")
    check_devices(recipe)
    require_served(recipe.generation, directory)
    with tempfile.TemporaryDirectory(prefix="areal-flow-evaluate-") as scratch:
        layout = RunLayout(Path(scratch).resolve())
        layout.config.write_text(dump_recipe(recipe))
        copy_model_description(directory, layout.model)
        publish_model_directory(directory, layout.weights_of(NO_WRITER))
        if run is not None and run.rewards.is_dir():
            shutil.copytree(run.rewards, layout.rewards)
        held_out = layout.held_out_prompts
        if data:
            names = [each["name"] for each in held_out_sets(data)]
            prepare_held_out(recipe, layout, names=names)
        elif run is not None:
            held_out = run.held_out_prompts
        prompts_asked = _first_of_each_set(PromptTable(held_out, seed=recipe.seed).rows(), limit)
        progress = make_progress(to_stderr=True)
        said = f"Evaluating {title or directory} on {len(prompts_asked)} held-out prompts"
        try:
            answers = wait_for(lambda: _answer(layout, recipe, prompts_asked, progress, said=said))
        finally:
            progress.close()
    threshold = recipe.pass_threshold
    table = tabulate(answers, threshold=threshold)
    return EvaluationResult(table, answers, title or str(directory), threshold)


def held_out_sets(data: Sequence[str]) -> list[dict[str, str]]:
    """Return the held-out sets that are given as NAME=PATH, or as PATH, whose stem is the name."""
    found = []
    for given in data:
        name, _, path = given.rpartition("=")
        found.append({"name": name or Path(path).stem, "path": str(Path(path).resolve())})
    names = [each["name"] for each in found]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"--data: expected another name for each file, found {', '.join(names)}: give "
            "--data NAME=PATH"
        )
    return found


def _with_sets_of(run: RunLayout | None, sets: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return some sets after a run's others, which `rewards.sources` may name."""
    names = {each["name"] for each in sets}
    known = load_recipe(run.config).evaluation.held_out if run else ()
    return [*(each.model_dump(mode="json") for each in known if each.name not in names), *sets]


def _first_of_each_set(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    last = inf if limit is None else limit
    places = defaultdict[str, Iterator[int]](count)
    return [prompt for prompt in prompts if next(places[prompt.source]) < last]


async def _answer(
    layout: RunLayout, recipe: Recipe, prompts: list[Prompt], progress: Progress, *, said: str
) -> list[dict[str, Any]]:
    workers = [placed for placed in place_workers(recipe) if placed.role != "trainer"]
    progress.phase(f"Starting {len(workers)} workers")
    context = WorkerContext(layout.root, NO_WRITER)
    async with launch_cluster(workers, recipe.cluster, context) as cluster:
        progress.phase(said)
        reader = DirectoryReader(layout.weights_of(NO_WRITER))
        answers = answer_held_out(
            counted(
                DaskRollouts(cluster.client, reader, cluster.pool).answer,
                progress,
                total=len(prompts),
            ),
            prompts,
            settings=recipe.evaluation,
            name="evaluate",
            seed=recipe.seed,
            writer_epoch=NO_WRITER,
            decode=partial(texts_of, tokenizer_of(layout.model)),
        )
        return await cluster.pool.guard(answers)
