"""A question as a source gives it, before template and tokeniser."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """`origin` is where an error message points: a file and line, or a generator's item."""

    question_id: str
    text: str
    answer: str
    difficulty: int
    origin: str
