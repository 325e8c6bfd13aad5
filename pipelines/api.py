"""The Python API: what `areal-flow train`, `evaluate` and `sft` do, from a script or a notebook."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from areal_flow.config import Recipe, build_recipe, load_recipe
from areal_flow.config_errors import setting_names
from areal_flow.errors import ConfigError
from areal_flow.layout import RunLayout, run_layout
from areal_flow.rewards.shipping import ship_function
from areal_flow.settings import merge, nest
from areal_flow.store.queries import Run, open_run
from pipelines.built_in import write_jsonl
from pipelines.evaluate import EvaluationResult, evaluate_model
from pipelines.forking import Fork, fork_of
from pipelines.jobs import (
    DEFAULT_RECIPE,
    SFT,
    TRAINING,
    Job,
    default_name,
    recipe_path,
    recipe_to_resume,
    start,
)
from pipelines.jobs import resume as resume_run
from pipelines.references import find_reference, newest_checkpoint

Rows = Any
"""A path of JSONL or Parquet, dicts, or a pandas, polars, Arrow or Hugging Face table of rows."""


def train(
    recipe: Recipe | Path | str | None = None,
    *,
    prompts: Rows | None = None,
    rewards: Sequence[Callable[..., Any] | str] = (),
    source: Run | str | None = None,
    reset_optimizer: bool = False,
    resume: Run | str | None = None,
    accept_verifier: bool = False,
    name: str | None = None,
    runs: Path | str = "runs",
    **settings: Any,
) -> Run:
    """Train a policy; return the run to read.

    Ctrl-C, or an interrupt of a notebook's cell, ends training after the step: the run is stopped
    with a checkpoint, and is returned like one that finished. A second one ends it at once.

    Args:
        recipe: settings, or the path of a TOML recipe; by default every setting's default, and
            the arithmetic recipe where there are no `prompts`.
        prompts: rows with a question, or messages, and an answer, in the fields that the recipe
            says.
        rewards: functions of `prompt`, `completion`, `answer` and any column of a row, as keywords,
            that return a number; or names of verifiers. A function is shipped to the workers with
            all it needs.
        source: another run, `"RUN"` or `"RUN@STEP"`, with whose policy this one begins, and whose
            recipe it has instead of one given.
        reset_optimizer: with `source`: without that run's optimizer state.
        resume: a run that was stopped, or is to be trained further, to go on with; of all else
            only `num_steps`, `max_minutes` and `accept_verifier` go with it.
        accept_verifier: with `resume`: even if the code that scores changed.
        name: of the run's directory; recipe and time by default.
        runs: the folder of runs.
        settings: over the recipe's, `num_steps=20`, `trainer={"learning_rate": 1e-5}`, or by
            dotted name, `**{"trainer.learning_rate": 1e-5}`. A setting that one section alone has
            needs no section: `max_new_tokens=200`.

    Raises:
        ArealFlowError: a setting or a prompt is wrong and nothing was started, or the run failed.
        KeyboardInterrupt: it was interrupted twice, or where there was no step to finish.
    """
    if resume is not None:
        new = {"recipe": recipe, "prompts": prompts, "source": source, "name": name}
        unfit = [
            key for key, value in {**new, "rewards": rewards or None}.items() if value is not None
        ]
        if unfit:
            raise ConfigError(f"expected resume without {', '.join(unfit)}: a run keeps its own")
        return _resume(resume, settings, accept_verifier=accept_verifier, runs=Path(runs))
    if accept_verifier:
        raise ConfigError("accept_verifier goes with resume")
    if prompts is not None:
        settings = merge(settings, {"prompts.source": "file", "sources": []})
    elif recipe is None and source is None:
        recipe = DEFAULT_RECIPE
    fork = None
    if source is not None:
        if recipe is not None:
            raise ConfigError("expected a recipe or a source, found both")
        named = str(source.layout.root) if isinstance(source, Run) else source
        fork = fork_of(find_reference(Path(runs), named), reset_optimizer=reset_optimizer)
    brought = "prompts", prompts, rewards
    layout = _start(TRAINING, fork or recipe, settings, brought, name=name, runs=Path(runs))
    return open_run(layout.root)


def evaluate(
    model: Run | Path | str,
    *,
    prompts: Rows | None = None,
    num_prompts: int | None = None,
    runs: Path | str = "runs",
    registry: str | None = None,
    **settings: Any,
) -> EvaluationResult:
    """Answer held-out prompts with a policy; return pass rates and answers.

    Args:
        model: a run, its name, models:/NAME@ALIAS, or a model directory.
        prompts: as for `train`, instead of the run's own held-out ones.
        num_prompts: answer only the first ones.
        runs: the folder of runs.
        registry: MLflow's address, for models:/...
        settings: over the run's, as for `train`; those of `evaluation` need no section:
            `temperature=0`, `top_p=0.9`, `num_samples=8`, `max_new_tokens=200`.

    Raises:
        ModelError: there is no such model, or nothing says which prompts to use.
    """
    if isinstance(model, Run):
        title, directory = model.layout.name, newest_checkpoint(model.layout)
    else:
        title = str(model)
        directory = find_reference(Path(runs), str(model), registry=registry).model()
    with tempfile.TemporaryDirectory(prefix="areal-flow-prompts-") as scratch:
        data = [] if prompts is None else [str(file_of(prompts, Path(scratch) / "given.jsonl"))]
        return evaluate_model(
            directory,
            data=data,
            limit=num_prompts,
            title=title,
            settings=placed(settings, section="evaluation"),
        )


def sft(
    recipe: Recipe | Path | str | None = None,
    *,
    rows: Rows | None = None,
    name: str | None = None,
    runs: Path | str = "runs",
    **settings: Any,
) -> Path:
    """Fine-tune a policy on prompts with their completions; return its Hugging Face directory.

    Args:
        recipe: settings, or the path of a TOML recipe; by default every setting's default.
        rows: rows with `prompt` and `completion`, or `messages`, instead of the recipe's file.
        name: of the run's directory; recipe and time by default.
        runs: the folder of runs.
        settings: as for `train`: `model="org/name"`, `sft={"num_steps": 200}`.

    Raises:
        ArealFlowError: a setting or a row is wrong and nothing was started, or the run failed.
    """
    brought = "sft", rows, ()
    return newest_checkpoint(_start(SFT, recipe, settings, brought, name=name, runs=Path(runs)))


def report(run: Run | Path | str, *, to: Path | str | None = None) -> Path:
    """Draw a run on one page of HTML, also while it goes on; return where the page lies.

    Args:
        run: a run, or its directory.
        to: a file, instead of `report.html` in the run.

    Raises:
        RunError: there is no run, or it was never prepared for training.
    """
    from pipelines.report.page import write_report

    layout = (run if isinstance(run, Run) else open_run(run)).layout
    return write_report(layout, None if to is None else Path(to))


def _resume(run: Run | str, settings: dict[str, Any], *, accept_verifier: bool, runs: Path) -> Run:
    """Drive a run that was made before to its end."""
    began = monotonic()
    layout = run.layout if isinstance(run, Run) else find_reference(runs, run).run
    recipe = recipe_to_resume(layout, nest(settings))
    resume_run(TRAINING, layout, recipe, accept_verifier=accept_verifier, began=began)
    return open_run(layout.root)


def placed(settings: Mapping[str, Any], *, section: str = "") -> dict[str, Any]:
    """Return a nested table of settings; a name that one section alone has needs no section.

    Sections within a section, and `sft` beside others, do not count.

    Args:
        section: the one that is meant where it has a setting of that name.

    Raises:
        ConfigError: several sections have a setting of that name.
    """
    names = dict.fromkeys(setting_names(Recipe, in_arrays=False))
    table = {}
    for key, value in settings.items():
        homes = [name for name in names if name.endswith(f".{key}")]
        homes = [name for name in homes if not name.startswith("sft.")] or homes
        homes = [name for name in homes if name.count(".") == min(n.count(".") for n in homes)]
        if (own := f"{section}.{key}") in names:
            homes = [own]
        elif key in names or not homes:
            homes = [key]  # or there is no such setting, which validation says
        if len(homes) > 1:
            raise ConfigError(
                f"{key}: several sections have such a setting; expected one of "
                f"{', '.join(homes)}, as in **{{{homes[0]!r}: {value!r}}}"
            )
        table[homes[0]] = str(value.expanduser().absolute()) if isinstance(value, Path) else value
    return nest(table)


def _start(
    job: Job,
    recipe: Recipe | Path | str | Fork | None,
    settings: dict[str, Any],
    brought: tuple[str, Rows | None, Sequence[Callable[..., Any] | str]],
    *,
    name: str | None,
    runs: Path,
) -> RunLayout:
    """Make a run of a recipe, with settings over it, and drive it to its end.

    Args:
        brought: what the caller has in memory and a run must have in files: a section of the
            recipe, the rows that its `path` is to name, and reward functions.
    """
    began = monotonic()
    section, rows, rewards = brought
    over = placed(settings, section=section)
    if rows is not None:  # a recipe is validated before there is a place to write them to
        path = str(rows) if isinstance(rows, Path | str) else "given.jsonl"
        over = merge(over, {section: {"path": path}})
    fork = recipe if isinstance(recipe, Fork) else None
    if isinstance(recipe, Fork):
        stem, chosen = recipe.parent.name, recipe.recipe(over)
    elif isinstance(recipe, Path | str):
        stem, chosen = Path(recipe).stem, load_recipe(recipe_path(Path(recipe)), over)
    else:
        table = recipe.model_dump(mode="json") if recipe else {}
        stem, chosen = "python", build_recipe(table, over, source="the recipe given")

    def fill(layout: RunLayout, recipe: Recipe) -> Recipe:
        table = recipe.model_dump(mode="json")
        if rows is not None:
            path = file_of(rows, layout.root / f"{section}.jsonl")
            table[section]["path"] = str(path.resolve())
        if rewards:
            names = [r if isinstance(r, str) else ship_function(r, layout.rewards) for r in rewards]
            table["rewards"] = [{"verifier": name} for name in names]
        return build_recipe(table, source=str(layout.config))

    layout = run_layout(runs, name or default_name(stem))
    start(job, layout, chosen, began=began, recipe_name=stem, fill=fill, fork=fork)
    return layout


def file_of(rows: Rows, path: Path) -> Path:
    """Return the file that rows are in already, or the one at `path` that they are written to."""
    return Path(rows) if isinstance(rows, Path | str) else write_jsonl(path, rows_of(rows))


def rows_of(table: Rows) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table of any kind as dicts of plain values.

    Raises:
        ConfigError: it is no table.
    """
    if hasattr(table, "notna"):  # pandas writes NaN, NA or NaT where nothing is
        table = table.astype(object).where(table.notna(), None)
    for method, arguments in _AS_DICTS.items():
        if hasattr(table, method):
            table = getattr(table, method)(*arguments)
            break
    if isinstance(table, str | Mapping) or not isinstance(table, Iterable):
        raise ConfigError(
            "expected rows as a path, a list of dicts, or a pandas, polars, Arrow or Hugging Face "
            f"table, found {type(table).__name__}"
        )
    for row in table:
        if not isinstance(row, Mapping):
            raise ConfigError(f"expected a row as a dict, found {type(row).__name__}: {row!r:.80}")
        yield json.loads(json.dumps(dict(row), default=_plain))


_AS_DICTS: dict[str, tuple[str, ...]] = {
    "to_dicts": (),  # polars
    "to_pylist": (),  # Arrow
    "to_list": (),  # Hugging Face
    "to_dict": ("records",),  # pandas
}


def _plain(value: Any) -> Any:
    """Return a NumPy value as Python's; anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
