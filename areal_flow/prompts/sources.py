"""Which rows of prompt files are held out and which are trained on.

A file is read anew each time and never held in memory. A row that is wrong comes as the error that
says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from areal_flow.config import PromptSettings
from areal_flow.errors import PromptError
from areal_flow.prompts.files import Question, question_from_row, read_rows

Questions = Callable[[], "Iterable[Question | PromptError]"]


def split_questions(settings: PromptSettings, seed: int) -> tuple[Questions, Questions]:
    """Return held-out and training rows of two files, or of one whose fifth at most is held out."""
    path, held_out_path = settings.path, settings.held_out_path
    assert path is not None
    if held_out_path is not None:
        return (
            lambda: questions_of_file(held_out_path, settings),
            lambda: questions_of_file(path, settings),
        )
    num_rows = sum(1 for _ in read_rows(path))
    num_held_out = min(settings.num_held_out, num_rows // 5)
    held_out = set(random.Random(seed).sample(range(num_rows), num_held_out))

    def part(is_held_out: bool) -> Questions:
        return lambda: (
            question
            for position, question in enumerate(questions_of_file(path, settings))
            if (position in held_out) is is_held_out
        )

    return part(True), part(False)


def questions_of_file(path: Path, settings: PromptSettings) -> Iterator[Question | PromptError]:
    """Yield a file's questions; for a row that is none, the error that names file and line."""
    for origin, row in read_rows(path):
        try:
            if isinstance(row, PromptError):
                raise row
            yield question_from_row(
                row,
                origin=origin,
                question_field=settings.question_field,
                answer_field=settings.answer_field,
            )
        except PromptError as error:
            yield error
