"""Models and prompt sources that a recipe names, made here or fetched from other packages.

A name becomes files in the run directory before anything else reads the recipe, so that all other
code knows only model directories and files of rows, and a resume needs no other package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from areal_flow.config import Recipe
from areal_flow.core.errors import ConfigError, ModelError, PromptError
from areal_flow.core.layout import RunLayout
from areal_flow.core.program import how_to_install
from areal_flow.policy.tokenizer.auto_tokenizer import auto_tokenizer, write_tokenizer
from areal_flow.policy.tokenizer.directory import (
    check_model_directory,
    check_stop_tokens,
    copy_model_description,
    resolve_model,
    tokenizer_of,
)
from areal_flow.rewards.reasoning_gym import scorer_of
from areal_flow.rollout.prompts.formats import hub_dataset, is_saved_dataset
from areal_flow.rollout.prompts.settings import PromptSettings, SourceSettings
from areal_flow.rollout.workflows.sandbox_task import TASK, TASKS, SandboxTask
from areal_flow.sandboxes.harbor import HarborTask, ship_task, task_folders
from areal_flow.training.supervised import OBJECTIVES
from pipelines.tiny_jobs.lookups import look_ups, lookup_tokenizer, make_lookups
from pipelines.tiny_jobs.one_liners import coder_tokenizer, formulas_then_look_ups, make_one_liners
from pipelines.tiny_jobs.sentences import make_sentences
from pipelines.tiny_jobs.sums import (
    arithmetic_questions,
    calculator_tokenizer,
    curriculum,
    demonstrations,
    make_calculator,
)
from pipelines.tiny_jobs.tiny_policy import write_tiny_model

Row = Mapping[str, Any]
Rows = list[dict[str, Any]]
Fetch = Callable[[str, Recipe, Mapping[str, Any], RunLayout], tuple[Iterable[Row], Rows]]
"""Takes the text after the colon, the recipe of the source, the source's settings and where the run
is; returns training rows and held-out rows, or none of these, to hold out a part of the others."""


def make_arithmetic(recipe: Recipe) -> tuple[Rows, Rows]:
    prompts = recipe.prompts
    min_terms, max_terms = prompts.num_terms
    draw = partial(arithmetic_questions, seed=recipe.seed, min_terms=min_terms, max_terms=max_terms)
    held_out = [*draw(size=prompts.num_held_out, stream=0)]
    excluded = {row["question"] for row in held_out}
    train = draw(size=prompts.num_prompts, stream=1)
    return [row for row in train if row["question"] not in excluded], held_out


def reasoning_gym_rows(
    task: str, recipe: Recipe, settings: Mapping[str, Any], _: RunLayout
) -> tuple[Iterable[Row], Rows]:
    """Return entries of a task: question, answer, and metadata for the task's own scorer."""
    try:
        from reasoning_gym import create_dataset
    except ImportError:
        raise _missing("reasoning_gym", "reasoning-gym") from None
    if any(reward.verifier == "reasoning_gym" for reward in recipe.rewards):
        scorer_of(task)
    num_held_out = recipe.prompts.num_held_out
    size = num_held_out + recipe.prompts.num_prompts
    try:
        dataset = create_dataset(task, seed=recipe.seed, size=size, **settings)
        held_out = [dataset[index] for index in range(num_held_out)]
    except (ValueError, TypeError, AssertionError) as error:
        given = f" with the settings {dict(settings)}" if settings else ""
        raise ConfigError(f"source 'reasoning_gym:{task}'{given}: {error}") from None
    return (dataset[index] for index in range(num_held_out, size)), held_out


def dataset_rows(
    name: str, recipe: Recipe, settings: Mapping[str, Any], _: RunLayout
) -> tuple[Iterable[Row], Rows]:
    """Return the rows of a Hugging Face dataset, from the hub or a directory.

    Args:
        name: a directory or a name on the hub, with config and split: `owner/name:config@split`.
        settings: `config`, `split` (`train`), `held_out_split` (none: a part of the split is held
            out) and `revision`.
    """
    allowed = ("config", "split", "held_out_split", "revision")
    if unknown := sorted(settings.keys() - set(allowed)):
        raise ConfigError(
            f"source 'datasets:{name}' has no setting {unknown[0]!r}: it takes {', '.join(allowed)}"
        )
    if is_saved_dataset(Path(name)):
        raise PromptError(
            f"source 'datasets:{name}' is a folder of `datasets.save_to_disk`: name it as "
            "prompts.path (--data)"
        )
    if on_hub := hub_dataset(Path(name)):
        name, of_name = on_hub.name, {"config": on_hub.config, "split": on_hub.split}
        settings = {key: value for key, value in of_name.items() if value} | dict(settings)
    load = partial(load_rows, name, settings.get("config"), revision=settings.get("revision"))
    held_out_split = settings.get("held_out_split")
    held_out = islice(load(held_out_split), recipe.prompts.num_held_out) if held_out_split else ()
    return load(settings.get("split", "train")), [*held_out]


def load_rows(
    name: str, config: str | None, split: str, *, revision: str | None = None
) -> Iterable[Row]:
    """Load a split with the package `datasets`: from the hub, a mirror, its cache or a folder."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise _missing("datasets", "datasets") from None
    try:
        rows: Iterable[Row] = load_dataset(name, config, split=split, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        of = "" if Path(name).exists() else " of the hub (no path here has this name)"
        raise PromptError(
            f"dataset {name!r}{of}, config {config or 'by default'}, split {split!r}: {reason}. "
            "Name another as OWNER/NAME:CONFIG@SPLIT. Without a network, set HF_ENDPOINT to a "
            "mirror, or save its rows elsewhere as JSONL or Parquet and name the file"
        ) from error
    return rows


def fetched(path: Path, target: Path, *, split: str = "train") -> Path:
    """Return the path of rows; those of a dataset on the hub are written to `target`.

    Args:
        path: a path, or `owner/name:config@split`.
        target: a JSONL file.
        split: the split of a name without one.
    """
    if (dataset := hub_dataset(path)) is None:
        return path
    return write_jsonl(target, load_rows(dataset.name, dataset.config, dataset.split or split))


def verifiers_rows(
    environment: str, recipe: Recipe, settings: Mapping[str, Any], _: RunLayout
) -> tuple[Iterable[Row], Rows]:
    """Return the first tasks of an environment, for an agent."""
    if settings:
        raise ConfigError(f"source 'verifiers:{environment}' takes no settings, found {settings}")
    try:
        from areal_flow.rollout.workflows.verifiers_agent import rows
    except ImportError:
        raise _missing("verifiers", "verifiers") from None
    return rows(environment, recipe.prompts.num_prompts + recipe.prompts.num_held_out), []


def harbor_rows(
    folder: str, recipe: Recipe, settings: Mapping[str, Any], layout: RunLayout
) -> tuple[Iterable[Row], Rows]:
    """Return the instructions of a folder's tasks, and copy the tasks to the run."""
    if settings:
        raise ConfigError(f"source 'harbor:{folder}' takes no settings, found {settings}")
    if not isinstance(recipe.workflow, SandboxTask):
        raise ConfigError(
            f"source 'harbor:{folder}' needs workflow.name = 'sandbox', found "
            f"{recipe.workflow.name!r}: a task's own tests give its reward"
        )
    rows = []
    for task in map(HarborTask, task_folders(Path(folder).expanduser())):
        task.settings(recipe.workflow.sandbox)
        name = ship_task(task, layout.rewards / TASKS)
        rows.append({"question": task.instruction, TASK: name})
    return rows, []


def _missing(package: str, extra: str) -> ConfigError:
    return ConfigError(
        f"prompts of {package!r} need the package of this name: {how_to_install(extra)}"
    )


FETCHED: dict[str, Fetch] = {
    "reasoning_gym": reasoning_gym_rows,
    "datasets": dataset_rows,
    "verifiers": verifiers_rows,
    "harbor": harbor_rows,
}
"""By the text before the colon of a source's name."""


MODELS: dict[str, Callable[..., None]] = {
    "tiny": write_tiny_model,
    "tiny_calculator": partial(write_tiny_model, make_tokenizer=calculator_tokenizer),
    "tiny_lookup": partial(write_tiny_model, make_tokenizer=lookup_tokenizer),
    "tiny_coder": partial(write_tiny_model, make_tokenizer=coder_tokenizer),
}
SOURCES: dict[str, Callable[[Recipe], tuple[Rows, Rows]]] = {
    "arithmetic": make_arithmetic,
    "calculator": make_calculator,
    "lookups": make_lookups,
    "one_liners": make_one_liners,
    "sentences": make_sentences,
}
"""Functions that make training rows and held-out rows."""
DEMONSTRATIONS: dict[tuple[str, str], Callable[..., Iterable[Mapping[str, Any]]]] = {
    ("tiny", "arithmetic"): curriculum,
    ("tiny_calculator", "calculator"): demonstrations,
    ("tiny_lookup", "lookups"): look_ups,
    ("tiny_coder", "one_liners"): formulas_then_look_ups,
}
"""Functions that make rows for supervised fine-tuning, by model and source."""
MAX_MODEL_LEN = 128
"""The context of a tiny model, if the recipe does not set it."""


def prepare_model(recipe: Recipe, layout: RunLayout) -> None:
    if make := MODELS.get(recipe.model):
        if Path(recipe.model, "config.json").is_file():
            raise ModelError(
                f"model = {recipe.model!r} is the name of a model made here, and of the model "
                f"directory {Path(recipe.model).resolve()}: write './{recipe.model}' for the "
                "directory, or rename it to have the one made here"
            )
        make(layout.model, max_model_len=recipe.generation.max_model_len or MAX_MODEL_LEN)
    else:
        source = resolve_model(recipe.model)
        check_model_directory(source)
        from areal_flow.policy.models.probe import probe_policy  # torch

        probe_policy(source, max_model_len=recipe.generation.max_model_len)
        copy_model_description(source, layout.model)
        write_tokenizer(source, layout.model)
    if recipe.trainer.lora.rank and recipe.trainer.lora.modules != "all-linear":
        from areal_flow.policy.models.policy import check_adapter  # torch

        check_adapter(layout.model, recipe.trainer.lora)
    check_stop_tokens(layout.model, recipe.generation.stop.token_ids)


def reference_model(recipe: Recipe, layout: RunLayout) -> Path | None:
    if not recipe.algorithm.reference:
        return None
    directory = resolve_model(recipe.algorithm.reference)
    check_model_directory(directory)
    if auto_tokenizer(directory).get_vocab() != tokenizer_of(layout.model).get_vocab():
        raise ModelError(
            f"algorithm.reference: expected the tokens of model {recipe.model!r}, found others in "
            f"{directory}: log-probabilities are compared token by token; take one with the same "
            "tokenizer"
        )
    from areal_flow.policy.models.probe import probe_policy  # torch

    probe_policy(directory, max_model_len=recipe.generation.max_model_len)
    return directory


def initial_model(recipe: Recipe, layout: RunLayout) -> Path:
    """Return the directory of the first policy; its weights are initialized if it has none."""
    return layout.model if recipe.model in MODELS else resolve_model(recipe.model)


def with_files(recipe: Recipe, layout: RunLayout) -> Recipe:
    """Write the rows of named sources; return the recipe with these files instead of names.

    The default recipe with another model is trained without fine-tuning on the tiny model's rows.
    """
    recipe = _with_fetched(recipe, layout)
    sft = recipe.sft
    recipe = _with_sources(recipe, layout)
    if recipe.sft.path or not sft.num_steps:
        return recipe
    if recipe.model in MODELS:
        raise ConfigError(
            f"sft.num_steps ({sft.num_steps}) needs {rows_wanted(recipe)}: only a model "
            "and a prompts.source that are made for each other bring their own: "
            f"{', '.join(map(' and '.join, DEMONSTRATIONS))}. Give one, or --sft.num-steps 0; see "
            "the gsm8k recipe"
        )
    return changed(recipe, "sft", num_steps=0)


def _with_fetched(recipe: Recipe, layout: RunLayout) -> Recipe:
    """Write rows of the hub; return the recipe with these files."""
    folder = layout.train_prompts.parent

    def with_local(settings: Any, folder: Path) -> Any:
        files = {"path": ("train.jsonl", "train"), "held_out_path": ("held_out.jsonl", "test")}
        update = {
            setting: fetched(path, folder / file, split=split)
            for setting, (file, split) in files.items()
            if (path := getattr(settings, setting))
        }
        return settings.model_copy(update=update)

    sets = recipe.evaluation.held_out
    files = [fetched(s.path, folder / f"set-{s.name}.jsonl", split="test") for s in sets]
    held_out = [s.model_copy(update={"path": p}) for s, p in zip(sets, files, strict=True)]
    update = {
        "prompts": with_local(recipe.prompts, folder),
        "sources": tuple(with_local(each, folder / each.name) for each in recipe.sources),
        "evaluation": recipe.evaluation.model_copy(update={"held_out": tuple(held_out)}),
    }
    return with_fetched_sft(recipe.model_copy(update=update), layout)


def with_fetched_sft(recipe: Recipe, layout: RunLayout) -> Recipe:
    if not (recipe.sft.num_steps and recipe.sft.path):
        return recipe
    rows = fetched(recipe.sft.path, layout.sft_rows.with_name("rows.jsonl"))
    return changed(recipe, "sft", path=rows)


def rows_wanted(recipe: Recipe) -> str:
    """Describe the file that supervised fine-tuning needs, for a message."""
    sft = recipe.sft
    command = "sft" if sft.objective == "cross_entropy" else sft.objective.replace("_", "-")
    fields = " and ".join(OBJECTIVES[sft.objective].fields)
    return f"sft.path (--data of `areal-flow {command}`), JSONL with prompt and {fields}"


def _with_sources(recipe: Recipe, layout: RunLayout) -> Recipe:
    folder = layout.train_prompts.parent
    if not recipe.sources:
        made = _with_made_rows(recipe, {}, folder, layout)
        return recipe.model_copy(update={"prompts": made.prompts, "sft": made.sft})
    sources, sft = [], recipe.sft
    for source, part in zip(recipe.sources, recipe.by_source().values(), strict=True):
        made = _with_made_rows(part, source.settings, folder / source.name, layout)
        fields = SourceSettings.model_fields.keys() & PromptSettings.model_fields.keys()
        files = {name: getattr(made.prompts, name) for name in fields}
        sources.append(source.model_copy(update=files))
        sft = made.sft if made.sft.path else sft
    return recipe.model_copy(update={"sources": tuple(sources), "sft": sft})


def _with_made_rows(
    recipe: Recipe, settings: Mapping[str, Any], folder: Path, layout: RunLayout
) -> Recipe:
    prompts, sft = recipe.prompts, recipe.sft
    kind, _, argument = prompts.source.partition(":")
    takes_settings = kind in FETCHED and argument
    if settings and not takes_settings:
        raise ConfigError(f"source {prompts.source!r} takes no settings, found {sorted(settings)}")
    if prompts.source == "file":
        return recipe
    if takes_settings:
        train, held_out = FETCHED[kind](argument, recipe, settings, layout)
    elif prompts.source in SOURCES:
        train, held_out = SOURCES[prompts.source](recipe)
        recipe = changed(recipe, "prompts", question_field="question", answer_field="answer")
    else:
        names = ", ".join(["file", *SOURCES, *(f"{kind}:NAME" for kind in FETCHED)])
        raise ConfigError(f"prompts.source = {prompts.source!r}: expected one of {names}")
    made = changed(
        recipe,
        "prompts",
        source="file",
        path=write_jsonl(folder / "train.jsonl", train),
        held_out_path=write_jsonl(folder / "held_out.jsonl", held_out) if held_out else None,
    )
    demonstrate = DEMONSTRATIONS.get((recipe.model, prompts.source))
    if sft.path or not sft.num_steps or not demonstrate or sft.objective != "cross_entropy":
        return made
    rows = demonstrate(
        [prompts.template.replace("{question}", row["question"]) for row in train],
        num_steps=sft.num_steps,
        batch_size=sft.batch_size,
        seed=recipe.seed,
    )
    return changed(made, "sft", path=write_jsonl(layout.sft_rows.with_name("rows.jsonl"), rows))


def changed(recipe: Recipe, section: str, **settings: Any) -> Recipe:
    """Return the recipe with changed settings of a section, without validation."""
    update = {section: getattr(recipe, section).model_copy(update=settings)}
    return recipe.model_copy(update=update)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.writelines(json.dumps(row, default=str) + "\n" for row in rows)
    return path
