"""The models and prompt sources that a recipe may name and that are made here, not downloaded.

A name becomes files in the run directory before anything else reads the recipe, so that the core
knows model directories and files of rows alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from areal_flow.config import Recipe
from areal_flow.errors import ConfigError
from areal_flow.layout import RunLayout
from areal_flow.models.directory import (
    check_model_directory,
    copy_model_description,
    resolve_model,
)
from areal_flow.prompts.files import Question
from pipelines.arithmetic.curriculum import curriculum
from pipelines.arithmetic.sums import arithmetic_questions
from pipelines.arithmetic.tiny_policy import write_tiny_model

QuestionSource = Callable[[Recipe], tuple[list[Question], list[Question]]]
"""Makes the questions to train on and the held-out ones."""


def make_arithmetic(recipe: Recipe) -> tuple[list[Question], list[Question]]:
    """Return distinct sums; a held-out one is not among those to train on."""
    settings = recipe.prompts

    def stream(number: int, size: int) -> list[Question]:
        terms = {"min_terms": settings.min_terms, "max_terms": settings.max_terms}
        return [*arithmetic_questions(size=size, seed=recipe.seed, stream=number, **terms)]

    held_out = stream(0, settings.num_held_out)
    held_out_texts = {question.text for question in held_out}
    train = stream(1, settings.num_prompts)
    return [question for question in train if question.text not in held_out_texts], held_out


MODELS: dict[str, Callable[..., None]] = {"tiny": write_tiny_model}
SOURCES: dict[str, QuestionSource] = {"arithmetic": make_arithmetic}
DEMONSTRATED = ("tiny", "arithmetic")
"""The model and the source that come with rows for supervised fine-tuning."""


def prepare_model(recipe: Recipe, layout: RunLayout) -> None:
    """Write configuration and tokenizer of the policy into the run directory.

    Raises:
        ModelError: there is no such model, or it cannot be trained.
    """
    if make := MODELS.get(recipe.model):
        make(layout.model, max_model_len=recipe.generation.max_model_len)
        return
    source = resolve_model(recipe.model)
    check_model_directory(source)
    from areal_flow.models.probe import probe_policy  # torch: only where there is a model

    probe_policy(source, max_model_len=recipe.generation.max_model_len)
    copy_model_description(source, layout.model)


def initial_model(recipe: Recipe, layout: RunLayout) -> Path:
    """Return the directory that the first policy comes from; without weights, they are drawn."""
    return layout.model if recipe.model in MODELS else resolve_model(recipe.model)


def with_files(recipe: Recipe, layout: RunLayout) -> Recipe:
    """Return the recipe with files in place of names; the files of a made source are written.

    Raises:
        ConfigError: there is no such source, or no rows for supervised fine-tuning.
        PromptError: the source cannot make so many prompts.
    """
    prompts, sft = recipe.prompts, recipe.sft
    if prompts.source == "file":
        return _without_rows(recipe)
    if prompts.source not in SOURCES:
        names = ", ".join(["file", *SOURCES])
        raise ConfigError(f"prompts.source = {prompts.source!r}: expected one of {names}")
    train, held_out = SOURCES[prompts.source](recipe)
    folder = layout.train_prompts.parent
    made = {"source": "file", "question_field": "question", "answer_field": "answer"}
    changed: dict[str, Any] = {**made, "path": write_jsonl(folder / "train.jsonl", _rows(train))}
    if held_out:
        changed["held_out_path"] = write_jsonl(folder / "held_out.jsonl", _rows(held_out))
    recipe = recipe.model_copy(update={"prompts": prompts.model_copy(update=changed)})
    if (recipe.model, prompts.source) != DEMONSTRATED or sft.path or not sft.num_steps:
        return _without_rows(recipe)
    rows = curriculum(
        [prompts.template.replace("{question}", question.text) for question in train],
        num_steps=sft.num_steps,
        batch_size=sft.batch_size,
        seed=recipe.seed,
    )
    path = write_jsonl(layout.sft_rows.with_name("rows.jsonl"), rows)
    return recipe.model_copy(update={"sft": sft.model_copy(update={"path": path})})


def _without_rows(recipe: Recipe) -> Recipe:
    """Return the recipe; one that asks for supervised fine-tuning must say on what.

    The default recipe with another model is trained as that model is, without the tiny one's rows.
    """
    if recipe.sft.path or not recipe.sft.num_steps:
        return recipe
    if recipe.model in MODELS:
        raise ConfigError(
            f"sft.num_steps ({recipe.sft.num_steps}) needs sft.path, JSONL with prompt and "
            "completion: only prompts.source 'arithmetic' brings its own. Give one, or "
            "--sft.num-steps 0; see the gsm8k recipe"
        )
    return recipe.model_copy(update={"sft": recipe.sft.model_copy(update={"num_steps": 0})})


def _rows(questions: Iterable[Question]) -> Iterable[dict[str, Any]]:
    for of in questions:
        row = {"id": of.question_id, "question": of.text}
        yield {**row, "answer": of.answer, "difficulty": of.difficulty}


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as JSON, one a line; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path
