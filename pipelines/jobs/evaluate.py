"""Evaluate any model as a run would, through a workflow and rewards.

Workers read everything from a run directory, so a model is evaluated in a temporary one, with its
weights published and without a log.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import pyarrow as pa

from areal_flow.cluster.launch import launch_cluster
from areal_flow.cluster.placement import place_workers
from areal_flow.cluster.rollouts import DaskRollouts
from areal_flow.cluster.worker import WorkerContext
from areal_flow.config import Recipe, build_recipe, dump_recipe, load_recipe
from areal_flow.core.errors import ConfigError, ModelError
from areal_flow.core.layout import RunLayout
from areal_flow.core.pass_rates import (
    PASS_THRESHOLD,
    EvaluationTable,
    PairedComparison,
    compare_answers,
    rows_by_set,
    tabulate,
)
from areal_flow.core.settings import flatten, merge
from areal_flow.core.types import Prompt
from areal_flow.flow.answers import answer_held_out
from areal_flow.log.inputs import read_inputs
from areal_flow.log.run_log import EVALUATIONS
from areal_flow.policy.tokenizer.auto_tokenizer import warn_of_other_tokens, write_tokenizer
from areal_flow.policy.tokenizer.directory import (
    check_model_directory,
    copy_model_description,
    texts_of,
    tokenizer_of,
)
from areal_flow.policy.weights.directory import DirectoryReader, publish_model_directory
from areal_flow.rewards.shipping import what_is_executed
from areal_flow.rollout.engines.protocol import WHOLE_DISTRIBUTION
from areal_flow.rollout.engines.registry import require_served
from areal_flow.rollout.prompts.formats import hub_dataset
from areal_flow.rollout.prompts.prepare import (
    check_first_rows,
    chosen_fields,
    prepare_held_out,
)
from areal_flow.rollout.prompts.rendering import unused_chat_template, why_chat_template
from areal_flow.rollout.prompts.table import PromptTable
from pipelines.console.progress import Progress, counted, make_progress
from pipelines.jobs.built_in import changed, fetched
from pipelines.jobs.preflight import check_devices
from pipelines.jobs.prepare import with_context_length
from pipelines.jobs.stop_signals import wait_for
from pipelines.models import run_of_checkpoint

NO_WRITER = 0
"""The writer epoch of files that no run's driver writes."""
NUM_GENERATORS_ON_CPU = 2
JUDGED_BY: Any = {
    "rewards": True,
    "pass_threshold": True,
    "workflow": True,
    "evaluation": {"num_samples", *WHOLE_DISTRIBUTION},
    "generation": {"max_new_tokens", "max_model_len", "stop"},
}
"""Settings on which answers and their rewards depend."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Pass rates, mean rewards, and the answers behind them: rows of the evaluation schema."""

    table: EvaluationTable
    answers: list[dict[str, Any]]
    title: str = ""
    """Name of the model."""
    pass_threshold: float = PASS_THRESHOLD
    policy_version: int | None = None
    """The policy version of its run; None for a model that no run trained."""

    def __repr__(self) -> str:
        passed = self.table.overall.passed
        rate = f"pass rate {passed.pass_rate:.3f} [{passed.low:.3f}, {passed.high:.3f}]"
        return f"<EvaluationResult {self.title}: {rate} of {passed.n} prompts>"

    def _repr_html_(self) -> str:
        from pipelines.pages.report import render

        kind, parts = self.table.parts
        rows = {**(parts if len(parts) > 1 else {}), "all": self.table.overall}
        return render("pages/evaluation.html", title=self.title, kind=kind, rows=rows)


def compare_models(first: EvaluationResult, second: EvaluationResult) -> PairedComparison:
    """Compare two models on the same prompts, by the second one's pass threshold."""
    return compare_answers(first.answers, second.answers, threshold=second.pass_threshold)


def compare_by_set(
    first: EvaluationResult, second: EvaluationResult
) -> dict[str, PairedComparison]:
    of_second = rows_by_set(second.answers)
    return {
        name: compare_answers(answers, of_second[name], threshold=second.pass_threshold)
        for name, answers in rows_by_set(first.answers).items()
    }


def answers_table(results: Sequence[EvaluationResult]) -> pa.Table:
    return pa.concat_tables(
        pa.Table.from_pylist(result.answers, EVALUATIONS).append_column(
            "model", pa.array([result.title] * len(result.answers), pa.string())
        )
        for result in results
    )


def evaluate_model(
    directory: Path,
    *,
    data: Sequence[str] = (),
    limit: int | None = None,
    title: str = "",
    settings: Mapping[str, Any] | None = None,
    judged_as: RunLayout | None = None,
) -> EvaluationResult:
    """Answer held-out prompts with a model; progress goes to standard error.

    Args:
        directory: a checkpoint of a run, whose settings hold, or a Hugging Face directory.
        data: files or hub names, PATH or NAME=PATH each, instead of the run's own held-out sets.
        limit: answer only the first ones of each set.
        title: name of the model; by default its directory.
        settings: a nested table over the run's settings.
        judged_as: the run whose settings and prompts apply to a model of no run.
    """
    with tempfile.TemporaryDirectory(prefix="areal-flow-rows-") as folder:
        local = with_fetched_sets(data, Path(folder))
        return _evaluate(directory, local, limit, title, settings, judged_as)


def _evaluate(
    directory: Path,
    data: Sequence[str],
    limit: int | None,
    title: str,
    settings: Mapping[str, Any] | None,
    judged_as: RunLayout | None,
) -> EvaluationResult:
    check_model_directory(directory)
    own = run_of_checkpoint(directory)
    run = own or judged_as
    if run is None and not data:
        raise ModelError(f"{directory} lies in no run: give --data FILE, in Python prompts=...")
    recipe, notes = _recipe(run, data, settings), list[str]()
    if executed := what_is_executed(recipe.function_paths):
        print(executed, file=sys.stderr, flush=True)
    if data:
        recipe, notes = _with_fields(recipe, held_out_sets(data))
        rewards = (run or RunLayout(directory)).rewards
        check_first_rows(recipe.prompt_plan(), rewards, held_out=[*held_out_sets(data)])
        if why := why_chat_template(recipe.prompt_plan()):
            recipe = changed(recipe, "prompts", chat_template=True)
            notes.append(f"prompts.chat_template = true, since {why}")
        elif unused := unused_chat_template(recipe.prompts, directory):
            notes.append(unused)
    check_devices(recipe)
    require_served(recipe.generation, directory)
    version = int(directory.name) if own and directory.parent == own.checkpoints else None
    with _scratch_directory(run, recipe) as scratch:
        layout = RunLayout(Path(scratch).resolve())
        recipe = _fill(layout, directory, recipe, run, version=version or 0)
        held_out = _held_out_prompts(run, data, layout, recipe)
        prompts = _first_of_each_set(PromptTable(held_out, seed=recipe.seed).rows(), limit)
        warn_of_other_tokens(directory, layout.model, [prompt.text for prompt in prompts])
        progress = make_progress(to_stderr=True)
        for note in notes:
            progress.phase(note)
        phase = f"Evaluating {title or directory} on {len(prompts)} held-out prompts"
        try:
            answers = wait_for(lambda: _answer(layout, recipe, prompts, progress, phase=phase))
        finally:
            progress.close()
    table = tabulate(answers, threshold=recipe.pass_threshold)
    return EvaluationResult(table, answers, title or str(directory), recipe.pass_threshold, version)


def _with_fields(recipe: Recipe, names: Collection[str]) -> tuple[Recipe, list[str]]:
    """Return the recipe with the fields of these held-out sets, and notes about them."""
    sets, notes = [], list[str]()
    for each in recipe.evaluation.held_out:
        own = (each.path, each, recipe.prompts)
        chosen, note = chosen_fields(*own) if each.name in names else ({}, "")
        sets.append(each.model_copy(update=chosen))
        notes += [note] if note else []
    return changed(recipe, "evaluation", held_out=tuple(sets)), notes


def with_fetched_sets(data: Sequence[str], folder: Path) -> list[str]:
    """Return NAME=PATH of each file; datasets of the hub are written to a folder."""
    files = []
    for given in data:
        name, _, path = given.rpartition("=")
        if dataset := hub_dataset(Path(path)):
            name = name or dataset.name.rpartition("/")[2]
            given = f"{name}={fetched(Path(path), folder / f'{name}.jsonl', split='test')}"
        files.append(given)
    return files


def _fill(
    layout: RunLayout, directory: Path, recipe: Recipe, run: RunLayout | None, *, version: int
) -> Recipe:
    """Write what workers read: model, settings, weights and rewards; return the settings."""
    copy_model_description(directory, layout.model)
    recipe, _ = with_context_length(recipe, layout.model)
    layout.config.write_text(dump_recipe(recipe))
    if run_of_checkpoint(directory) is None:
        write_tokenizer(directory, layout.model)
    publish_model_directory(directory, layout.weights_of(NO_WRITER), version=version)
    if run is not None and run.rewards.is_dir():
        shutil.copytree(run.rewards, layout.rewards)
    return recipe


def evaluate_all(
    directories: Sequence[Path],
    titles: Sequence[str],
    *,
    data: Sequence[str] = (),
    limit: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[EvaluationResult]:
    """Answer the same prompts with one model or several, with one verifier and one sampling.

    A model of no run is judged by the settings of the first one that belongs to a run.
    """
    runs = [run for run in map(run_of_checkpoint, directories) if run is not None]
    _require_alike(runs, data, settings)
    return [
        evaluate_model(
            path,
            data=data,
            limit=limit,
            title=title,
            settings=settings,
            judged_as=next(iter(runs), None),
        )
        for path, title in zip(directories, titles, strict=True)
    ]


def _require_alike(
    runs: Sequence[RunLayout], data: Sequence[str], settings: Mapping[str, Any] | None
) -> None:
    judged: list[dict[str, Any]] = []
    for run in runs:
        recipe = _recipe(run, data, settings)
        temperature = recipe.evaluation.sampling().get("temperature", recipe.generation.temperature)
        own = {"temperature": temperature, "the verifier's code": read_inputs(run).verifier}
        judged.append(flatten(recipe.model_dump(include=JUDGED_BY)) | own)
    names = dict.fromkeys(name for of in judged for name in of)
    differing = [name for name in names if len({repr(of.get(name)) for of in judged}) > 1]
    if differing:
        raise ConfigError(
            f"runs {' and '.join(run.name for run in runs)} differ in {', '.join(differing)}: "
            "expected one verifier and one sampling for both models, or their pass rates cannot be "
            "compared. Give the sampling as options, or evaluate each by itself"
        )


def _recipe(
    run: RunLayout | None, data: Sequence[str], settings: Mapping[str, Any] | None
) -> Recipe:
    """Return the settings of an evaluation: a run's, without a trainer."""
    given = merge({"trainer": {"device": "cpu"}}, dict(settings or {}))
    if data:
        sets = held_out_sets(data)
        # A run's own sets are kept: `rewards.sources` may name them.
        own = load_recipe(run.config).evaluation.held_out if run else ()
        kept = [each.model_dump(mode="json") for each in own if each.name not in sets]
        added = [{"name": name, "path": path} for name, path in sets.items()]
        given = merge(given, {"evaluation": {"held_out": [*kept, *added]}})
    recipe = load_recipe(run.config, given) if run else build_recipe({}, given, source="defaults")
    if recipe.generation.device == "cuda" or "num_generators" in given.get("cluster", {}):
        return recipe
    cluster = recipe.cluster.model_copy(update={"num_generators": NUM_GENERATORS_ON_CPU})
    return recipe.model_copy(update={"cluster": cluster})


def _scratch_directory(run: RunLayout | None, recipe: Recipe) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary directory; workers on other machines see only the run's directory."""
    root = None if run is None or recipe.cluster.is_one_machine else run.root
    return tempfile.TemporaryDirectory(prefix="areal-flow-evaluate-", dir=root)


def _held_out_prompts(
    run: RunLayout | None, data: Sequence[str], layout: RunLayout, recipe: Recipe
) -> Path:
    """Return the prompt table: of the given files, or else the run's own."""
    if run is None or data:
        prepare_held_out(recipe.prompt_plan(), layout, names=[*held_out_sets(data)])
        return layout.held_out_prompts
    if tokenizer_of(run.model).to_str() != tokenizer_of(layout.model).to_str():
        raise ModelError(
            f"the model has another tokenizer than run {run.name}, whose held-out prompts are "
            "stored as its tokens: give --data FILE, in Python prompts=..."
        )
    return run.held_out_prompts


def held_out_sets(data: Sequence[str]) -> dict[str, str]:
    """Return paths by the name of their held-out set, from PATH or NAME=PATH."""
    parts = [given.rpartition("=") for given in data]
    names = [name or Path(path).stem for name, _, path in parts]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"--data: expected another name for each file, found {', '.join(names)}: give "
            "--data NAME=PATH"
        )
    return {n: str(Path(path).resolve()) for n, (_, _, path) in zip(names, parts, strict=True)}


def _first_of_each_set(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    places = defaultdict[str, Iterator[int]](count)
    bound = inf if limit is None else limit
    return [prompt for prompt in prompts if next(places[prompt.source]) < bound]


async def _answer(
    layout: RunLayout, recipe: Recipe, prompts: list[Prompt], progress: Progress, *, phase: str
) -> list[dict[str, Any]]:
    workers = [placed for placed in place_workers(recipe) if placed.role != "trainer"]
    progress.phase(f"Starting {len(workers)} workers")
    context = WorkerContext(layout.root, NO_WRITER)
    async with launch_cluster(workers, recipe.cluster, context) as cluster:
        progress.phase(phase)
        reader = DirectoryReader(layout.weights_of(NO_WRITER))
        rollouts = DaskRollouts(
            cluster.client, reader, cluster.pool, max_attempts=recipe.controller.max_attempts
        )
        answers = answer_held_out(
            counted(rollouts.answer, progress, total=len(prompts)),
            prompts,
            settings=recipe.evaluation,
            name="evaluate",
            seed=recipe.seed,
            writer_epoch=NO_WRITER,
            decode=partial(texts_of, tokenizer_of(layout.model)),
        )
        return await cluster.pool.guard(answers)
