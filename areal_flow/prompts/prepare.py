"""Prepares a run's two prompt tables, training and held-out, disjoint by text.

Rows are rendered, tokenised, checked against the context and validated in batches, so memory does
not grow with the file. Bad rows end the preparation, unless they are to be skipped: then they are
counted and listed.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from areal_flow.config import PromptSettings, Recipe
from areal_flow.errors import PromptError
from areal_flow.layout import RunLayout
from areal_flow.models.directory import tokenizer_of
from areal_flow.prompts.bad_rows import refuse_bad_rows
from areal_flow.prompts.files import Question, good, read_questions
from areal_flow.rewards.numeric import verify_numeric
from schemas import PromptRow, arrow_schema, validate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROMPTS = arrow_schema(PromptRow)
BATCH_ROWS = 1024

Questions = Callable[[], "Iterable[Question | PromptError]"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a preparation found."""

    num_train: int
    num_held_out: int
    bad_rows: list[str]


class _Preparation:
    """Turns questions into rows; remembers bad ones and texts already used."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self._recipe = recipe
        self._tokenizer = tokenizer
        self.bad_rows: dict[str, None] = {}

    def good(self, questions: Iterable[Question | PromptError]) -> Iterator[Question]:
        """Yield the good questions; a bad one is noted."""
        for read in questions:
            try:
                question = good(read)
                self._check_answer(question)
                self.row(question)
            except PromptError as error:
                self.bad_rows[str(error)] = None
                continue
            yield question

    def refuse_bad_rows(self) -> None:
        """End everything if there are bad rows that are not to be skipped.

        Raises:
            PromptError: naming file, line and field of the first ten.
        """
        if not self._recipe.prompts.skip_bad_rows:
            refuse_bad_rows(self.bad_rows, advice=", or use --skip-bad-rows")

    def row(self, question: Question) -> dict[str, Any]:
        """Render and tokenise.

        Raises:
            PromptError: prompt and completion do not fit the context together.
        """
        generation = self._recipe.generation
        text = self._recipe.prompts.template.replace("{question}", question.text)
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        room = generation.max_model_len - generation.max_new_tokens
        if not 0 < len(tokens) <= room:
            raise PromptError(
                f"{question.origin}: the prompt has {len(tokens)} tokens, expected 1 to {room}: "
                f"generation.max_model_len ({generation.max_model_len}) minus max_new_tokens "
                f"({generation.max_new_tokens})"
            )
        return {
            "prompt_id": question.question_id or hashlib.sha256(text.encode()).hexdigest()[:16],
            "prompt": text,
            "answer": question.answer,
            "difficulty": question.difficulty,
            "metadata": question.metadata,
            "prompt_tokens": tokens,
        }

    def _check_answer(self, question: Question) -> None:
        if all(reward.verifier != "numeric" for reward in self._recipe.rewards):
            return
        check = verify_numeric(prompt="", completion="", answer=question.answer)
        if check.verdict == "bad_answer":
            field_name = self._recipe.prompts.answer_field
            raise PromptError(
                f"{question.origin}: field {field_name!r}: the numeric verifier needs a number at "
                f"the end, found {question.answer[-40:]!r}"
            )


def prepare_prompts(recipe: Recipe, layout: RunLayout) -> Prepared:
    """Write the run's prompt tables from its files of prompts.

    Raises:
        PromptError: naming file, line and field of the first bad rows, or what else is missing.
    """
    preparation = _preparation(recipe, layout)
    held_out, train = _split_questions(recipe.prompts, recipe.seed)
    held_out_texts: set[str] = set()
    chosen = islice(preparation.good(held_out()), recipe.prompts.num_held_out)
    num_held_out = _write(layout.held_out_prompts, preparation, _distinct(chosen, held_out_texts))
    unseen = (
        question for question in preparation.good(train()) if question.text not in held_out_texts
    )
    num_train = _write(layout.train_prompts, preparation, unseen)
    preparation.refuse_bad_rows()
    prepared = Prepared(num_train, num_held_out, list(preparation.bad_rows))
    layout.bad_rows.write_text("".join(json.dumps(row) + "\n" for row in prepared.bad_rows))
    if not num_train:
        raise PromptError("no prompts are left to train on; give more, or hold out fewer")
    return prepared


def prepare_held_out(recipe: Recipe, layout: RunLayout) -> int:
    """Write the whole prompt file as the held-out table; return how many prompts it has.

    Raises:
        PromptError: as `prepare_prompts`.
    """
    preparation = _preparation(recipe, layout)
    assert recipe.prompts.path is not None
    questions = preparation.good(_questions_of_file(recipe.prompts.path, recipe.prompts))
    num_rows = _write(layout.held_out_prompts, preparation, questions)
    preparation.refuse_bad_rows()
    return num_rows


def _preparation(recipe: Recipe, layout: RunLayout) -> _Preparation:
    layout.train_prompts.parent.mkdir(parents=True, exist_ok=True)
    return _Preparation(recipe, tokenizer_of(layout.model))


def _distinct(questions: Iterable[Question], seen: set[str]) -> Iterator[Question]:
    for question in questions:
        if question.text not in seen:
            seen.add(question.text)
            yield question


def _write(path: Path, preparation: _Preparation, questions: Iterable[Question]) -> int:
    num_rows = 0
    remaining = iter(questions)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, PROMPTS) as writer:
        while batch := [preparation.row(question) for question in islice(remaining, BATCH_ROWS)]:
            writer.write_table(validate(pa.Table.from_pylist(batch, schema=PROMPTS), PromptRow))
            num_rows += len(batch)
    return num_rows


def _split_questions(settings: PromptSettings, seed: int) -> tuple[Questions, Questions]:
    """Return held-out and training rows of two files, or of one whose fifth at most is held out."""
    path, held_out_path = settings.path, settings.held_out_path
    assert path is not None
    if held_out_path is not None:
        return (
            lambda: _questions_of_file(held_out_path, settings),
            lambda: _questions_of_file(path, settings),
        )
    num_rows = sum(1 for _ in _questions_of_file(path, settings))
    num_held_out = min(settings.num_held_out, num_rows // 5)
    held_out = set(random.Random(seed).sample(range(num_rows), num_held_out))

    def part(is_held_out: bool) -> Questions:
        return lambda: (
            question
            for position, question in enumerate(_questions_of_file(path, settings))
            if (position in held_out) is is_held_out
        )

    return part(True), part(False)


def _questions_of_file(path: Path, settings: PromptSettings) -> Iterator[Question | PromptError]:
    return read_questions(
        path, question_field=settings.question_field, answer_field=settings.answer_field
    )
