"""Questions in, two prepared tables out: training and held-out, disjoint by text.

Rows are rendered, tokenised, checked against the context and validated in batches, so memory does
not grow with the file. Bad rows end the preparation, unless they are to be skipped: then they are
counted and listed.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from tokenizers import Tokenizer

from areal_flow.config import Recipe
from areal_flow.errors import PromptError
from areal_flow.layout import RunLayout
from areal_flow.prompts.files import question_from_row, read_rows
from areal_flow.prompts.question import Question
from areal_flow.rewards.numeric import verify_numeric
from schemas import PromptRow, arrow_schema, validate

PROMPTS = arrow_schema(PromptRow)
BATCH_ROWS = 1024


@dataclass(slots=True)
class Prepared:
    """What a preparation found."""

    num_train: int = 0
    num_held_out: int = 0
    bad_rows: list[str] = field(default_factory=list)


class _Preparation:
    """Turns questions into rows; remembers bad ones and texts already used."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self._recipe = recipe
        self._tokenizer = tokenizer
        self.bad_rows: dict[str, None] = {}

    def questions(self, path: Path) -> Iterator[Question]:
        """Yield a file's good questions; a bad one is skipped and noted, or ends everything."""
        settings = self._recipe.prompts
        for origin, row in read_rows(path):
            try:
                if isinstance(row, PromptError):
                    raise row
                question = question_from_row(
                    row,
                    origin=origin,
                    question_field=settings.question_field,
                    answer_field=settings.answer_field,
                )
                self._check_answer(question)
                self.row(question)
            except PromptError as error:
                if not settings.skip_bad_rows:
                    raise PromptError(f"{error}. Mend it, or use --skip-bad-rows") from None
                self.bad_rows[str(error)] = None
                continue
            yield question

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
            "prompt_tokens": tokens,
        }

    def _check_answer(self, question: Question) -> None:
        if self._recipe.rewards.verifier != "numeric":
            return
        check = verify_numeric(prompt="", completion="", answer=question.answer)
        if check.verdict == "bad_answer":
            field_name = self._recipe.prompts.answer_field
            raise PromptError(
                f"{question.origin}: field {field_name!r}: the numeric verifier needs a number at "
                f"the end, found {question.answer[-40:]!r}"
            )


def prepare_prompts(recipe: Recipe, layout: RunLayout) -> Prepared:
    """Write the run's prompt tables.

    Raises:
        PromptError: naming file, line and field of the first bad row, or what else is missing.
    """
    tokenizer = Tokenizer.from_file(str(layout.model / "tokenizer.json"))
    preparation = _Preparation(recipe, tokenizer)
    held_out, train = _sources(recipe, preparation)
    layout.train_prompts.parent.mkdir(parents=True, exist_ok=True)
    held_out_texts: set[str] = set()
    prepared = Prepared()
    prepared.num_held_out = _write(
        layout.held_out_prompts, preparation, _distinct(held_out(), held_out_texts)
    )
    unseen = (question for question in train() if question.text not in held_out_texts)
    prepared.num_train = _write(layout.train_prompts, preparation, unseen)
    prepared.bad_rows = list(preparation.bad_rows)
    layout.bad_rows.write_text("".join(json.dumps(row) + "\n" for row in prepared.bad_rows))
    if not prepared.num_train:
        raise PromptError("no prompts are left to train on; give more, or hold out fewer")
    return prepared


def prepare_held_out(recipe: Recipe, layout: RunLayout) -> int:
    """Write a whole prompt file as the held-out table; return how many prompts it has.

    Raises:
        PromptError: as `prepare_prompts`.
    """
    tokenizer = Tokenizer.from_file(str(layout.model / "tokenizer.json"))
    preparation = _Preparation(recipe, tokenizer)
    assert recipe.prompts.path is not None
    layout.held_out_prompts.parent.mkdir(parents=True, exist_ok=True)
    return _write(layout.held_out_prompts, preparation, preparation.questions(recipe.prompts.path))


Source = Callable[[], Iterable[Question]]


def _sources(recipe: Recipe, preparation: _Preparation) -> tuple[Source, Source]:
    settings = recipe.prompts
    path = settings.path
    assert path is not None
    if settings.held_out_path is not None:
        held_out_path = settings.held_out_path
        return (
            lambda: islice(preparation.questions(held_out_path), settings.num_held_out),
            lambda: preparation.questions(path),
        )
    return _split_file(preparation, path, settings.num_held_out, recipe.seed)


def _split_file(
    preparation: _Preparation, path: Path, num_held_out: int, seed: int
) -> tuple[Source, Source]:
    """Hold out rows drawn by the run's seed, at most a fifth of the file."""
    num_rows = sum(1 for _ in preparation.questions(path))
    held = random.Random(seed).sample(range(num_rows), min(num_held_out, num_rows // 5))
    chosen = set(held)

    def part(held_out: bool) -> Source:
        return lambda: (
            question
            for position, question in enumerate(preparation.questions(path))
            if (position in chosen) is held_out
        )

    return part(True), part(False)


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
